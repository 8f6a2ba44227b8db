"use strict";
/* The page of the report and of the live view. The report contains its data; the view requests it from its server.
   Texts of models are inserted as text nodes only. */
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const live = data.live === true;
  const $ = (id) => document.getElementById(id);
  const runColours = ["#0072b2", "#e69f00", "#009e73", "#cc79a7"];
  const agentColours = ["#009e73", "#9467d8", "#a6761d", "#cc79a7", "#1b9aaa", "#7d8c1f", "#7f7f7f"]; // neither blue nor orange, which are raised and lowered
  const dashes = ["solid", "dashed", "dotted", [8, 3, 2, 3]];
  const symbols = ["circle", "rect", "triangle", "diamond"];
  const PAGE = 25;

  /* ---- data --------------------------------------------------------------------------------------------------------- */

  const query = (values) => new URLSearchParams(Object.entries(values).filter(([, v]) => v !== "" && v != null)).toString();
  async function asked(path, values) {
    const answer = await fetch(`api/${path}?${query(values)}`);
    if (answer.ok) return answer.json();
    const said = await answer.json().catch(() => ({}));
    throw new Error(typeof said.detail === "string" ? said.detail : `${answer.status} ${answer.statusText}`);
  }
  const answers = (path) => (values = {}) => asked(path, values);
  const embedded = {
    overview: async () => data.overview,
    trajectories: async (wanted) => {
      const fits = data.samples.trajectories.filter((trajectory) => matches(trajectory, graphOf(trajectory), wanted));
      return { total: fits.length, trajectories: fits.slice(wanted.offset, wanted.offset + wanted.limit) };
    },
    search: async (wanted) => {
      const words = wordsOf(wanted.text), all = data.samples.trajectories.filter((trajectory) => matches(trajectory, graphOf(trajectory), wanted));
      const found = all.map((trajectory) => ({ ...trajectory, match: matchOf(graphOf(trajectory), words) })).filter((trajectory) => trajectory.match);
      const steps = new Set(data.samples.trajectories.map((trajectory) => trajectory.training_step)).size;
      return { trajectories: found, searched: steps, of: steps, next: null };
    },
    trajectory: async ({ trajectory_id, training_step }) => sampled(data.samples.graphs, `${training_step} ${trajectory_id}`, "trajectory"),
    step: async ({ step_id, training_step }) => sampled(data.samples.steps, `${training_step} ${step_id}`, "step"),
  };
  const source = live ? Object.fromEntries(["overview", "trajectories", "search", "trajectory", "step"].map((name) => [name, answers(name)])) : embedded;
  const graphOf = (trajectory) => data.samples.graphs[`${trajectory.training_step} ${trajectory.trajectory_id}`];
  const wordsOf = (text) => [...text.toLowerCase().matchAll(/"([^"]+)"|([^\s"]+)/g)].map((match) => match[1] ?? match[2]);
  function matchOf(graph, words) {
    const steps = graph.steps.filter((step) => words.every((word) => [step.prompt, step.response, step.id].some((text) => text.toLowerCase().includes(word))));
    if (!steps.length) return null;
    const [step] = steps, text = [step.response, step.prompt].find((text) => text.toLowerCase().includes(words[0])) ?? step.response, from = Math.max(0, text.toLowerCase().indexOf(words[0]) - 60);
    return { index: step.index, agent: step.agent, excerpt: text.slice(from, from + 200), steps: steps.length };
  }
  function sampled(of, id, what) {
    if (!Object.hasOwn(of, id)) throw new Error(`This ${what} is not among the samples; creditflow view shows all.`);
    return of[id];
  }
  function matches(trajectory, graph, w) {
    const ended = trajectory.ended_right === null ? "unscored" : trajectory.ended_right ? "right" : "wrong";
    if (w.outcome && w.outcome !== ended) return false;
    if (w.training_step !== "" && w.training_step != null && Number(w.training_step) !== trajectory.training_step) return false;
    const asks = w.agent || w.gate || w.least_score !== "" || w.most_score !== "";
    return !asks || graph.steps.some((s) => (!w.agent || s.agent === w.agent) && (!w.gate || s.gate_open === (w.gate === "open"))
      && (w.least_score === "" || (s.sub_reward !== null && s.sub_reward >= Number(w.least_score)))
      && (w.most_score === "" || (s.sub_reward !== null && s.sub_reward <= Number(w.most_score))));
  }

  /* ---- helpers ------------------------------------------------------------------------------------------------------ */

  function el(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "onclick") made.addEventListener("click", value);
      else if (value !== null && value !== undefined) made.setAttribute(name, value);
    }
    made.append(...children.filter((child) => child !== null && child !== undefined));
    return made;
  }
  function svg(tag, attributes = {}, ...children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
  }
  const known = (value) => value !== null && value !== undefined;
  const number = (value, digits = 3) => (known(value) ? Number(value).toFixed(digits) : "-");
  const signed = (value) => (known(value) ? Number(value).toLocaleString("en", { minimumFractionDigits: 3, maximumFractionDigits: 3, signDisplay: "exceptZero" }) : "-");
  const percent = (value) => (known(value) ? `${(100 * value).toFixed(1)} %` : "-");
  const count = (value) => (known(value) ? Number(value).toLocaleString("en") : "-");
  const rounded = (value, digits = 4) => Number(value).toLocaleString("en", { maximumSignificantDigits: digits });
  const inUnit = (value, unit, digits) => (unit === "share" ? `${rounded(100 * value, digits)} %` : rounded(value, digits));
  const ended = (trajectory) => (trajectory.ended_right === null ? "no outcome" : trajectory.ended_right ? "right" : "wrong");
  const short = (text, most) => (text && text.length > most ? `${text.slice(0, most)}…` : text || "");
  /* Columns are [heading, class, meaning]; a cell is a text or an element. */
  function table(columns, rows) {
    const head = el("tr", {}, ...columns.map(([name, kind, meaning]) => el("th", { class: kind, scope: "col", title: meaning }, name)));
    const body = rows.map((row) => el("tr", {}, ...row.map((cell, i) => (cell?.tagName === "TD" ? cell : el("td", { class: columns[i][1] }, cell)))));
    return el("table", {}, el("thead", {}, head), el("tbody", {}, ...body));
  }
  /* Wide content in a box of its own, which the keyboard reaches and scrolls. */
  const scroll = (content, label = "Wide content") => el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, content);
  const title = (text) => el("h3", {}, text);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const mix = (a, b, t) => `rgb(${[0, 1, 2].map((i) => Math.round(a[i] + (b[i] - a[i]) * t)).join(",")})`;
  /* Blue above zero, orange below, pale at zero: distinct with any colour vision and by brightness. */
  function hue(value, most) {
    if (!known(value) || !most) return "rgb(235,235,235)";
    const t = Math.min(1, Math.abs(value) / most);
    return mix([244, 244, 244], value >= 0 ? [67, 147, 195] : [241, 143, 59], Math.sqrt(t));
  }
  const largest = (values) => values.reduce((most, value) => Math.max(most, Math.abs(value ?? 0)), 1e-9);
  let agentNames = [];
  const lineOf = (agent) => { const i = Math.max(0, agentNames.indexOf(agent)), n = agentColours.length; return { color: agentColours[i % n], symbol: symbols[i % symbols.length], type: dashes[Math.floor(i / n) % dashes.length] }; };
  const named = (agent, tag = "span") => el(tag, { class: "agent", style: `--agent:${lineOf(agent).color}`, title: agent }, agent);

  /* ---- charts ------------------------------------------------------------------------------------------------------ */

  const drawn = new Map();
  function chart(place, option, said) {
    let made = drawn.get(place);
    if (!made) {
      made = charts.init(place, null, { renderer: "svg" });
      drawn.set(place, made);
      new ResizeObserver(() => made.resize()).observe(place);
    }
    const ink = css("--ink"), soft = css("--soft");
    const styled = (a) => ({ axisLine: { lineStyle: { color: soft } }, nameTextStyle: { color: soft }, splitLine: { lineStyle: { color: css("--grid") } }, ...a, axisLabel: { color: soft, ...a.axisLabel } });
    const many = option.series.length > 1;
    made.setOption({ animation: false, aria: { enabled: true, label: { description: said } }, textStyle: { color: ink }, legend: { left: 0, top: 0, type: "scroll", itemWidth: 18, textStyle: { color: ink }, show: many }, grid: { left: 0, right: 14, top: many ? 34 : 12, bottom: 22, outerBoundsMode: "same", outerBoundsContain: "axisLabel" }, ...option, tooltip: { trigger: "axis", confine: true, renderMode: "richText", ...option.tooltip }, xAxis: option.xAxis.map(styled), yAxis: styled(option.yAxis) }, true);
    place.setAttribute("role", "img");
    place.setAttribute("aria-label", said);
  }
  /* Limits and an interval of 1, 2 or 5 times a power of ten. */
  function nice(low, high, most, least = 0) {
    const raw = Math.max((high - low || Math.abs(high) || 1) / most, least), power = 10 ** Math.floor(Math.log10(raw)), clean = (value) => Number(value.toPrecision(12));
    const interval = [1, 2, 5, 10].map((k) => k * power).find((size) => size >= raw * 0.999);
    const min = Math.floor(low / interval + 1e-9), max = Math.ceil(high / interval - 1e-9);
    return { min: clean(min * interval), max: clean(Math.max(max, min + 1) * interval), interval: clean(interval) };
  }
  const isUnit = (unit) => unit && unit !== "own" && unit !== "share"; // shares are in percent
  function lines(place, of, series) {
    const { title: name, unit } = of, points = series.flatMap((one) => one.points), steps = points.map((p) => p[0]), values = points.map((p) => p[1]);
    const marks = told.events.map((event) => ({ xAxis: event.step, label: { show: false } }));
    const seen = new Map(told.events.map((event) => [event.step, `${event.rule} ${event.what || ""}: ${event.note || event.action || ""}`]));
    const shown = (value) => `${inUnit(value, unit)}${isUnit(unit) ? ` ${unit}` : ""}`;
    const least = Math.min(...values), most = Math.max(...values);
    chart(place, {
      tooltip: { formatter: (points) => [`training step ${points[0].axisValue}`, ...points.map((p) => `${p.seriesName}: ${shown(p.value[1])}`), seen.get(points[0].axisValue) || ""].join("\n").trim() },
      xAxis: [{ type: "value", ...nice(Math.min(...steps), Math.max(...steps), 6, 1) }],
      yAxis: { type: "value", ...nice(least, most, 5), axisLabel: { formatter: (value) => inUnit(value, unit, 12) } },
      series: series.map((one, i) => ({ type: "line", name: one.name, data: one.points, symbol: one.points.length > 60 ? "none" : one.line?.symbol ?? "circle", symbolSize: 5, color: one.line?.color ?? runColours[i % runColours.length], lineStyle: { width: 1.8, type: one.line?.type ?? "solid" }, markLine: i === 0 && marks.length ? { silent: true, symbol: "none", lineStyle: { color: css("--bad"), type: "dotted" }, data: marks } : undefined })),
    }, `${name}${isUnit(unit) ? ` in ${unit}` : ""} by training step: ${series.map((s) => `${s.name} from ${number(s.points[0]?.[1])} to ${number(s.points.at(-1)?.[1])}`).join("; ")}`);
  }
  /* The place of a chart in a box, under its title, whose hint is the metric's key and meaning. */
  function into(box, id, of) {
    let place = box.querySelector(`[data-chart="${CSS.escape(id)}"]`);
    if (!place) {
      place = el("div", { class: "chart", "data-chart": id });
      box.append(el("figure", { class: "figure" }, el("figcaption", { title: [of.key, of.meaning].filter(Boolean).join(": ") }, of.title, " ", el("span", {}, isUnit(of.unit) ? of.unit : "")), place));
    }
    return place;
  }
  const changes = (series) => series.some((one) => one.points.length > 1) && new Set(series.flatMap((one) => one.points.map((p) => p[1]))).size > 1;
  /* Draws the curves that change, and lists the others in a folded box. */
  function curves(box, fold, list) {
    const still = list.filter(([, , series]) => !changes(series)), last = (one, unit) => `${one.name ? `${one.name} ` : ""}${inUnit(one.points.at(-1)[1], unit)}`;
    for (const [id, of, series] of list) {
      if (changes(series)) lines(into(box, id, of), of, series);
      else box.querySelector(`[data-chart="${CSS.escape(id)}"]`)?.parentElement.remove();
    }
    fold.hidden = !still.length;
    const rows = still.map(([, of, series]) => el("li", { title: [of.key, of.meaning].filter(Boolean).join(": ") }, `${of.title}: ${series.map((one) => last(series.length > 1 ? one : { points: one.points }, of.unit)).join(", ")}${isUnit(of.unit) ? ` ${of.unit}` : ""}`));
    fold.replaceChildren(el("summary", {}, `${still.length} constant, or measured once`), el("ul", {}, ...rows));
  }

  /* ---- the run as a whole ------------------------------------------------------------------------------------------- */

  const SHOWN = ["val/pass_at_1", "train/pass_at_1", "val/step_error_rate", "reward/step_error_rate", "actor/entropy", "actor/grad_norm", "reward/error_rate", "propagation/pass_rate", "throughput/tokens_per_s"];
  /* The keys of these metrics; several trained policies have their own, such as `<policy>/actor/entropy`. */
  const shownOf = (curves) => SHOWN.flatMap((name) => Object.keys(curves).filter((key) => key === name || key.endsWith(`/${name}`)));
  let told = null;
  const metric = (name) => ({ ...told.curves[name], key: name });
  function seriesOf(name) {
    if (data.comparison) return data.comparison.runs.filter((run) => run.curves[name]).map((run) => ({ name: run.name, points: run.curves[name].points }));
    return told.curves[name] ? [{ name: told.curves[name].title, points: told.curves[name].points }] : [];
  }
  function show(overview) {
    told = overview;
    agentNames = [...new Set([told, ...(data.comparison?.runs ?? [])].flatMap((run) => run.agents.map((a) => a.agent)))].sort();
    const run = told.run;
    $("title").textContent = `creditflow: ${run.name}`;
    $("progress").textContent = live ? `live: ${run.indexed} of ${run.training_steps} training steps indexed` : "";
    $("facts").replaceChildren(...run.facts.map(([name, value, key]) => el("div", { title: key }, el("dt", {}, name), el("dd", {}, value))));
    findings();
    $("left-out").replaceChildren(...told.left_out.map((text) => el("p", { class: "note" }, el("b", {}, "Incomplete: "), text)));
    $("change").replaceChildren(...beforeAfter());
    const notes = told.notices.map((text) => el("p", { class: "note" }, text));
    const events = told.events.slice(-50).reverse().map((e) => [String(e.step), e.rule, e.what || "", e.metric || "", e.note || e.action || ""]);
    if (events.length) notes.push(title(`Guard events${events.length < told.events.length ? `: the newest ${events.length}` : ""}`), scroll(table([["training step", "n"], ["rule", ""], ["", ""], ["metric", ""], ["action", ""]], events), "Table: Guard events"));
    $("notes").replaceChildren(...notes);
    curves($("charts"), $("constant"), shownOf(told.curves).map((name) => [name, metric(name), seriesOf(name)]));
    for (const { dataset: { chart: name }, parentElement } of $("chosen").querySelectorAll("[data-chart]")) if (told.curves[name]) drawChosen(name); else parentElement.remove();
    $("metrics").replaceChildren(...Object.entries(told.curves).map(([name, of]) => el("option", { value: name }, of.title)));
    agents();
    const chosen = $("filter").agent, before = chosen.value;
    chosen.replaceChildren(el("option", { value: "" }, "any"), ...told.agents.map((a) => el("option", { value: a.agent }, a.agent)));
    chosen.value = before;
  }
  /* Before and after: of the validation if it was measured twice, else of training, with the last validation. */
  function beforeAfter() {
    const mean = (points) => points.reduce((sum, p) => sum + p[1], 0) / points.length;
    const said = (where, keys, of) => {
      const parts = ["pass@1", "wrong steps"].flatMap((name, i) => {
        const values = of(told.curves[keys[i]]?.points ?? []), [a, b] = values.map(percent);
        return values.length ? [", ", `${name} `, el("b", {}, b === undefined || a === b ? a : `${a} → ${b}`)] : [];
      });
      return parts.length ? [`${where}: `, ...parts.slice(1), ". "] : [];
    };
    const validation = ["val/pass_at_1", "val/step_error_rate"], quarter = (points) => Math.max(1, Math.floor(points.length / 4));
    const val = told.curves[validation[0]]?.points ?? [];
    if (val.length > 1) return said(`Validation, training step ${val[0][0]} → ${val.at(-1)[0]}`, validation, (points) => (points.length > 1 ? [points[0][1], points.at(-1)[1]] : []));
    return [
      ...said("Training, first → last quarter", ["train/pass_at_1", "reward/step_error_rate"], (points) => (points.length > 1 ? [mean(points.slice(0, quarter(points))), mean(points.slice(-quarter(points)))] : [])),
      ...said(`Validation, training step ${val[0]?.[0]}`, validation, (points) => points.slice(-1).map((p) => p[1])),
    ];
  }
  function findings() {
    const claims = told.findings.filter((one) => one.kind !== "unknown"), unknown = told.findings.filter((one) => one.kind === "unknown");
    const links = (one) => [
      one.metric && told.curves[one.metric] ? el("a", { href: `#${query({ curve: one.metric })}`, "data-metric": one.metric, title: one.metric }, told.curves[one.metric].title) : null,
      one.trajectory ? el("a", { href: addressOf({ trajectory: one.trajectory[0], training_step: one.trajectory[1] }) }, `trajectory ${one.trajectory[0]}`) : null,
    ].filter(Boolean);
    const item = (one) => el("li", { class: `finding ${one.kind}` }, el("p", { class: "sentence" }, one.sentence),
      el("p", { class: "evidence" }, one.evidence.join("; "), ...links(one).flatMap((link) => [" · ", link])),
      ...(one.change ? [el("p", { class: "change" }, "Try ", el("code", {}, one.change.setting), `: ${one.change.reason}.`)] : []));
    const missing = unknown.length ? [el("details", {}, el("summary", {}, `${unknown.length} ${unknown.length === 1 ? "question" : "questions"} without an answer`), el("ul", {}, ...unknown.map((one) => el("li", {}, one.sentence)))) ] : [];
    const none = claims.length ? [] : [el("p", { class: "hint" }, unknown.length ? "Nothing can be claimed of this run yet." : "No problem was found.")];
    $("found-out").replaceChildren(...none, el("ul", { class: "findings" }, ...claims.map(item)), ...missing);
  }
  function agents() {
    const gated = told.agents.some((a) => a.threshold !== null), withheld = (a) => number(a.withheld, 1);
    const columns = [
      ["agent", "", "", (a) => named(a.agent)], ["steps", "n", "in all training steps", (a) => count(a.steps)], ["scored", "n", "of its steps", (a) => percent(a.scored)],
      ["mean score (0 to 1)", "n", "1 is right", (a) => number(a.sub_reward)], ["wrong", "n", "of its scored steps: a score below the maximum", (a) => percent(a.error_rate)],
      ...(gated ? [["open gates", "n", "of its scored steps", (a) => percent(a.pass_rate)], ["threshold (0 to 1)", "n", "the last one in force", (a) => number(a.threshold, 2)]] : []),
      ["mean credit (reward)", "n", "credit is in units of reward", (a) => signed(a.credit)], ["share of |credit|", "n", "of all agents; credit below 0 counts like credit above 0", (a) => percent(a.share)],
      ...(gated ? [["withheld (reward)", "n", "credit withheld at its closed gates, summed", withheld]] : []),
      ["wrong but raised", "n", "of its wrong steps: those with a positive advantage", (a) => percent(a.wrong_raised)], ["right but lowered", "n", "of its right steps: those with a negative advantage", (a) => percent(a.right_lowered)],
    ];
    $("of-agents").replaceChildren(table(columns, told.agents.map((a) => columns.map(([, , , cell]) => cell(a)))));
    $("filter").gate.parentElement.hidden = !gated;
    if (!gated) $("filter").gate.value = "";
    const words = { sub_reward: ["mean score", "0 to 1"], credit: ["mean credit", "in reward"], pass_rate: ["open gates", "share"], threshold: ["threshold", "0 to 1"] };
    const list = Object.entries(words).map(([key, [title, unit]]) => [key, { title, unit }, Object.entries(told.series).filter(([, of]) => of[key].length).map(([agent, of]) => ({ name: agent, points: of[key], line: lineOf(agent) }))]);
    for (const of of told.tables) if (of.chart) list.push([of.title, { title: of.chart, unit: of.unit }, Object.entries(of.curves).filter(([, key]) => told.curves[key]).map(([name, key]) => ({ name, points: told.curves[key].points }))]);
    curves($("agent-charts"), $("constant-agents"), list.filter(([, , series]) => series.length));
    $("more-tables").replaceChildren(...told.tables.flatMap((of) => [title(of.title), scroll(table(of.columns, of.rows), `Table: ${of.title}`)]));
    heat();
    histogram();
  }
  function histogram() {
    const { edges, agents: counts, zero, tick } = told.advantages;
    if (!Object.keys(counts).length) return;
    const sum = (of) => count(of.reduce((all, n) => all + n, 0)), sides = (of) => `${sum(of.slice(0, of.length / 2))} lowered, ${sum(of.slice(of.length / 2))} raised`;
    chart(into($("advantages"), "advantages", { title: "Advantages", unit: `number of steps: lowered below 0, raised above${zero ? `; ${count(zero)} with 0 are left out` : ""}`, meaning: "the outermost bars hold what lies beyond", key: "" }), {
      xAxis: [{ type: "category", show: false, data: edges.slice(1).map((edge, i) => `${rounded(edges[i])} to ${rounded(edge)}`) }, { type: "value", position: "bottom", min: edges[0], max: edges.at(-1), interval: tick, splitLine: { show: false } }],
      yAxis: { type: "value", axisLine: { onZero: false }, ...nice(0, Math.max(...edges.slice(1).map((_, i) => Object.values(counts).reduce((sum, of) => sum + of[i], 0))), 5) },
      series: Object.entries(counts).map(([agent, of]) => ({ type: "bar", stack: "all", name: agent, data: of, color: lineOf(agent).color, barCategoryGap: "10%" })),
    }, `Distribution of advantages by agent, from ${number(edges[0])} to ${number(edges.at(-1))}: ${Object.entries(counts).map(([agent, of]) => `${agent} ${sides(of)}`).join("; ")}`);
  }
  function heat() {
    const key = $("heat-of").value, turns = [...new Set(told.heat.map((c) => c.turn))].sort((a, b) => a - b), most = largest(told.heat.map((c) => c[key])), shares = key === "error_rate";
    const cell = (agent, turn) => {
      const of = told.heat.find((c) => c.agent === agent && c.turn === turn), value = of?.[key];
      return el("td", known(value) ? { class: "n", style: `background:${hue(shares ? -value : value, most)}`, title: `${count(of.steps)} steps` } : { class: "n empty", title: of ? "no value" : "no steps" }, known(value) ? (shares ? percent(value) : signed(value)) : "-");
    };
    $("heat").replaceChildren(table([["agent", ""], ...turns.map((turn) => [`turn ${turn}${turn === told.last_turn ? " and later" : ""}`, "n"])], agentNames.filter((agent) => told.heat.some((c) => c.agent === agent)).map((agent) => [named(agent), ...turns.map((turn) => cell(agent, turn))])));
  }
  function compare() {
    if (!data.comparison) return;
    $("comparison").hidden = false;
    document.querySelector('nav a[href="#comparison"]').hidden = false;
    const sides = data.comparison.runs, names = sides.map((run) => [run.name, "n"]);
    const settings = Object.entries(data.comparison.settings).map(([key, values]) => [key, ...values.map((v) => (typeof v === "string" ? v : known(v) ? JSON.stringify(v) : "-"))]);
    const all = Object.assign({}, ...sides.map((run) => run.curves)), metrics = shownOf(all);
    const shares = [...new Set(sides.flatMap((run) => run.agents.map((a) => a.agent)))].flatMap((agent) => [["mean credit", "credit", signed], ["open gates", "pass_rate", percent], ["wrong but raised", "wrong_raised", percent]].filter(([, key]) => key !== "pass_rate" || sides.some((run) => run.agents.some((a) => a.threshold !== null))).map(([words, key, shown]) => [`${agent}: ${words}`, ...sides.map((run) => shown(run.agents.find((a) => a.agent === agent)?.[key]))]));
    $("compared").replaceChildren(
      title("Settings that differ"), scroll(table([["setting", ""], ...names], settings)),
      title("Last of each run"), scroll(table([["metric", ""], ...names], metrics.map((name) => [el("span", { title: name }, all[name].title), ...sides.map((run) => run.curves[name] ? inUnit(run.curves[name].points.at(-1)[1], run.curves[name].unit) : "-")]))),
      title("Agents"), scroll(table([["", ""], ...names], shares)));
  }

  /* ---- trajectories ---------------------------------------------------------------------------------------------------------- */

  let offset = 0;
  let places = [null]; // where each page of a search begins
  let asking = 0;
  const filters = () => Object.fromEntries(new FormData($("filter")));
  async function list() {
    const wanted = { ...filters(), offset, limit: PAGE }, mine = ++asking;
    const what = live ? "trajectories" : "sample trajectories", isSearch = wordsOf(wanted.text).length > 0;
    const none = live ? told.run.trajectories === 0 : data.samples.trajectories.length === 0;
    let page;
    try { page = isSearch ? await searched(wanted, mine) : await source.trajectories(wanted); } catch (error) { $("found").textContent = error.message; return; }
    if (page === null || mine !== asking) return; // another list was asked for meanwhile
    if (isSearch) {
      const from = places.length > 1 ? `page ${places.length}: ` : "";
      $("found").textContent = `${from}${count(page.trajectories.length)} ${what} found; ${count(page.searched)} of ${count(page.of)} training steps searched${page.next ? "" : ", the end"}`;
    } else {
      $("found").textContent = none ? (told.left_out.length ? `no ${what} can be shown: the notices at the top say why` : `no ${what}: ${told.run.trajectories ? "the report was written with --samples 0" : "none is on record yet"}`) : page.total ? `${count(page.total)} ${what}; ${count(offset + 1)} to ${count(offset + page.trajectories.length)} shown` : `no ${what} like that`;
    }
    const goTo = (p) => ({ trajectory: p.trajectory_id, training_step: p.training_step });
    const rows = page.trajectories.map((p) => el("li", {},
      el("button", { class: "row", type: "button", "data-trajectory": p.trajectory_id, "data-training-step": p.training_step, onclick: () => go(goTo(p)) }, el("b", {}, p.trajectory_id), ` ${ended(p)}`,
        el("span", {}, [`${count(p.n_steps)} steps`, known(p.first_error) && `error at ${p.first_error}`, p.status !== "ok" && p.status, live && `training step ${p.training_step}`].filter(Boolean).join(", ")), isSearch ? null : el("span", { class: "task" }, short(p.prompt, 110))),
      isSearch ? el("div", {}, el("a", { href: addressOf({ ...goTo(p), at: p.match.index }) }, `step ${p.match.index}, ${p.match.agent}`), `: ${p.match.excerpt}`) : null));
    $("list").replaceChildren(...rows);
    current();
    $("earlier").disabled = isSearch ? places.length < 2 : offset === 0;
    $("later").disabled = isSearch ? !page.next : offset + PAGE >= page.total;
    $("later").dataset.next = isSearch && page.next ? JSON.stringify(page.next) : "";
  }
  /* A page of a search: portions until it is full or all is searched; null if another list is asked for meanwhile. */
  async function searched(wanted, mine) {
    let begin = places.at(-1), found = [];
    for (;;) {
      const portion = await source.search({ ...wanted, offset: null, limit: PAGE - found.length, begin_step: begin?.[0], begin_number: begin?.[1] });
      if (mine !== asking) return null;
      found = [...found, ...portion.trajectories];
      if (found.length >= PAGE || !portion.next) return { ...portion, trajectories: found };
      begin = portion.next;
      $("found").textContent = `${count(found.length)} found so far; ${count(portion.searched)} of ${count(portion.of)} training steps searched`;
    }
  }
  function turn(by) {
    if (by > 0 && $("later").disabled || by < 0 && $("earlier").disabled) return;
    if (wordsOf(filters().text).length) { if (by > 0) places.push(JSON.parse($("later").dataset.next)); else places.pop(); } else offset = Math.max(0, offset + by * PAGE);
    list();
  }

  /* ---- addresses --------------------------------------------------------------------------------------------------------- */

  /* Every trajectory, step and token has an address after `#`; selecting one changes the address, which opens it. */
  const addressOf = (place) => `#${query(place)}`;
  const within = (place) => ({ trajectory: here.trajectory, training_step: here.training_step, ...place });
  function go(place) {
    const address = addressOf(place);
    if (location.hash === address) visit(); else location.hash = address;
  }
  let here = {};
  function current() {
    for (const row of listed()) if (row.dataset.trajectory === here.trajectory && row.dataset.trainingStep === here.training_step) row.setAttribute("aria-current", "true"); else row.removeAttribute("aria-current");
  }
  const saidOf = (id) => $("trajectory").querySelector(`li[data-step="${CSS.escape(id)}"]`);
  async function visit() {
    const place = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
    if (place.curve) {
      if (told.curves[place.curve]) { const drawn = [$("charts"), $("chosen")].find((box) => box.querySelector(`[data-chart="${CSS.escape(place.curve)}"]`)); choose(place.curve, drawn); }
      return;
    }
    if (!place.trajectory && !place.step) return;
    let id = place.trajectory;
    if (!id && here.training_step === place.training_step && saidOf(place.step)) id = here.trajectory;
    try { id ??= (await source.step({ step_id: place.step, training_step: place.training_step })).trajectory_id; } catch (error) { $("trajectory").replaceChildren(el("p", { class: "note" }, error.message)); return; }
    const same = here.trajectory === id && here.training_step === place.training_step;
    if (!same && !(await open(id, place.training_step))) return;
    const step = place.step ?? (place.at === undefined ? undefined : $("steps").children[Number(place.at)]?.dataset.step);
    if (step === undefined) { mark(null); $("trajectory").scrollIntoView({ block: "start" }); return; }
    mark(step);
    if (place.token !== undefined) await why(saidOf(step), place.token);
  }
  const drawChosen = (name) => lines(into($("chosen"), name, metric(name)), metric(name), seriesOf(name));
  function choose(name, box = $("chosen")) {
    if (box === $("chosen")) drawChosen(name);
    into(box, name).parentElement.scrollIntoView({ block: "center" });
  }
  /* Marks a step in the transcript and in the graph, and scrolls both to it. */
  function mark(id) {
    for (const other of $("trajectory").querySelectorAll("[aria-current]")) other.removeAttribute("aria-current");
    const said = id && saidOf(id), node = id && $("trajectory").querySelector(`g[data-node="${CSS.escape(id)}"]`);
    if (!said) return;
    for (const part of [said, node]) part.setAttribute("aria-current", "true");
    const box = node.closest(".graph"), [x, y] = node.dataset.at.split(" ");
    box.scrollTo(x - box.clientWidth / 2, y - box.clientHeight / 2);
    said.scrollIntoView({ block: "start" });
    $("told").textContent = `step ${id} is shown`;
  }

  /* ---- one trajectory ---------------------------------------------------------------------------------------------------- */

  const hasGate = (step) => known(step.gate_open);
  const direction = (step) => (step.trained === false ? "masked" : !known(step.advantage) ? "" : step.advantage > 0 ? "raised" : step.advantage < 0 ? "lowered" : "unchanged");
  const scoreOf = (step) => (step.failed ? "score failed" : known(step.sub_reward) ? `score ${number(step.sub_reward, 2)}` : "no score");
  const inRange = (range) => (range ? ` in [${range.map((edge) => rounded(edge)).join(", ")}]` : "");
  async function open(trajectory_id, training_step) {
    const box = $("trajectory");
    let graph;
    const mine = here = { trajectory: trajectory_id, training_step: String(training_step) };
    try { graph = await source.trajectory({ trajectory_id, training_step }); } catch (error) { here = {}; box.replaceChildren(el("p", { class: "note" }, error.message)); return false; }
    if (here !== mine) return false; // another one was chosen meanwhile
    const facts = [`outcome ${graph.outcome === null ? graph.outcome_said : `${rounded(graph.outcome)}${inRange(graph.outcome_range)}`}`, ...Object.entries(graph.outcomes).map(([agent, own]) => `outcome of ${agent} ${own}`), `expected ${graph.ground_truth}`, `answer ${graph.answer ?? "-"}`, `training step ${graph.training_step}`, ...(graph.status === "ok" ? [] : [graph.status])];
    const flows = graph.edges.some((e) => e.flow), gates = graph.steps.some(hasGate), most = largest(graph.steps.map((s) => s.advantage));
    box.replaceChildren(title(`Trajectory ${graph.trajectory_id}`), el("p", { class: "hint" }, short(facts.join(" · "), 600)), el("pre", { "aria-label": "Task" }, graph.task),
      el("p", { class: "hint" }, "Steps are coloured by advantage, which is credit minus a baseline, scaled: ", el("span", { class: "whole" }, "lowered ", el("span", { class: "legend" }), " raised"), `; the darkest has the trajectory's largest advantage. Scores are 0 to 1; a step with 1 is right, whatever the outcome. Credit is in units of reward.${flows ? " A line is as thick as the credit that flowed back along it." : graph.edges.some((e) => e.flow === null) ? " Lines show no credit: the rule declares no flow." : ""}${gates ? " A bar across a line is a closed gate." : ""}`),
      el("div", { class: "conversation" }, draw(graph, most), el("ol", { id: "steps" }, ...graph.steps.map((step) => transcript(step, graph, most)))));
    for (const text of box.querySelectorAll("pre")) if (text.scrollHeight > text.clientHeight + 1) { text.tabIndex = 0; text.setAttribute("role", "region"); }
    current();
    $("told").textContent = `trajectory ${graph.trajectory_id} is shown: ${graph.steps.length} steps`;
    return true;
  }
  function transcript(step, graph, most) {
    const score = (s) => `${s.name} ${s.status === "ok" ? (s.by_token ? "by token" : `${rounded(s.value)}${inRange(s.range)}`) : s.status}${s.weight === 0 ? ", not part of credit" : s.weight === 1 ? "" : `, weight ${rounded(s.weight)}`}${s.reason ? `: ${s.reason}` : ""}`;
    const advantage = step.trained === false ? "masked" : known(step.advantage) ? `${signed(step.advantage)} ${direction(step)}` : "-";
    const [only] = step.scores, plain = step.scores.length === 1 && only.value === step.sub_reward && !only.reason && only.weight === 1;
    const more = el("details", {}, el("summary", {}, "Why this advantage, and the tokens"), el("div", { class: "why" }));
    const said = el("li", { "data-step": step.id, style: `--agent:${lineOf(step.agent).color}` },
      el("p", { class: "numbers" }, named(step.agent, "b"), el("a", { href: addressOf({ step: step.id, training_step: graph.training_step }), title: step.id, "aria-label": `Link to step ${step.index}` }, `step ${step.index}`), step.first_error ? el("span", { class: "first" }, "first error") : null,
        el("span", { title: "0 to 1; 1 is right" }, scoreOf(step)), hasGate(step) ? el("span", { title: `threshold ${number(step.threshold, 2)}` }, `${step.gate_open ? "open" : "closed"} gate`) : null, el("span", { title: "in units of reward" }, `credit ${signed(step.credit)}`),
        el("span", { class: direction(step) === "masked" ? "masked" : "value", style: `background:${direction(step) === "masked" ? "none" : hue(step.advantage, most)}`, title: "credit minus its baseline, over the divisor" }, `advantage ${advantage}`)),
      el("pre", { class: "prompt", "aria-label": `Prompt of step ${step.index}`, "data-part": "prompt" }, step.prompt), el("pre", { "aria-label": `Response of step ${step.index}`, "data-part": "response" }, step.response),
      plain ? null : el("p", { class: "hint" }, step.scores.map(score).join(" · ") || "no reward function scored this step"), more);
    more.addEventListener("toggle", () => { if (more.open && !more.lastChild.childNodes.length) why(said); });
    return said;
  }
  /* A column for each agent, a row for each step; lines lead from a step to those that used it. */
  function draw(graph, most) {
    const lanes = [...new Set(graph.steps.map((s) => s.agent))], dx = 76, dy = 46, r = 13;
    const x = (i) => dx / 2 + lanes.indexOf(graph.steps[i].agent) * dx, y = (i) => 24 + i * dy;
    const flow = largest(graph.edges.map((e) => e.flow));
    const picture = svg("svg", { class: "trajectory", width: lanes.length * dx, height: y(graph.steps.length - 1) + 30, role: "group", "aria-label": `Graph of ${graph.steps.length} steps of ${lanes.length} agents` });
    for (const edge of graph.edges) {
      const [x1, y1, x2, y2] = [x(edge.parent), y(edge.parent), x(edge.child), y(edge.child)];
      const bend = x1 === x2 && edge.child - edge.parent > 1 ? 24 + 4 * Math.min(4, edge.child - edge.parent) : 0;
      const isKnown = edge.flow !== null, still = !isKnown || Math.abs(edge.flow) < 1e-12, shut = edge.open < 0.5, size = isKnown ? Math.abs(edge.flow) / flow : 0;
      const path = svg("path", { d: `M${x1},${y1} Q${(x1 + x2) / 2 + bend},${(y1 + y2) / 2} ${x2},${y2}`, fill: "none", style: `stroke:var(--${still ? "soft" : edge.flow > 0 ? "good" : "bad"})`, "stroke-width": 1 + 7 * size, "stroke-opacity": still ? 0.45 : 0.8, "stroke-dasharray": shut ? "3 4" : "none", "data-flow": isKnown ? edge.flow : "unknown" });
      path.append(svg("title", {}, `${isKnown ? `credit ${signed(edge.flow)} flowed` : "an unknown credit"} from step ${edge.child} to step ${edge.parent}${shut ? "; closed gate" : ""}`));
      picture.append(path);
      if (shut) {
        const a = Math.atan2(y2 - (y1 + y2) / 2, x2 - (x1 + x2) / 2 - bend), bx = x2 - 22 * Math.cos(a), by = y2 - 22 * Math.sin(a), s = Math.sin(a) * 9, c = Math.cos(a) * 9;
        picture.append(svg("line", { class: "gate", x1: bx - s, y1: by + c, x2: bx + s, y2: by - c, style: "stroke:var(--ink)", "stroke-width": 3 }));
      }
    }
    graph.steps.forEach((s, i) => {
      const said = `step ${s.index}, ${s.agent}: ${scoreOf(s)}, ${hasGate(s) ? `${s.gate_open ? "open" : "closed"} gate, ` : ""}credit ${signed(s.credit)}, advantage ${s.trained === false ? "masked" : `${signed(s.advantage)} ${direction(s)}`}${s.first_error ? ", first error" : ""}`;
      const node = svg("g", { tabindex: 0, role: "button", "data-node": s.id, "data-at": `${x(i)} ${y(i)}`, transform: `translate(${x(i)},${y(i)})` });
      if (s.first_error) node.append(svg("circle", { r: r + 5, fill: "none", style: "stroke:var(--bad)", "stroke-width": 2 }));
      node.append(svg("circle", { class: "step", r, fill: s.trained === false ? "rgb(235,235,235)" : hue(s.advantage, most), stroke: lineOf(s.agent).color, "stroke-width": 2.5, "stroke-dasharray": s.trained === false ? "3 3" : "none" }), svg("text", { "text-anchor": "middle", y: 4 }, String(s.index)), svg("title", {}, said));
      const select = () => { mark(s.id); go({ ...here, step: s.id }); };
      node.addEventListener("click", select);
      node.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") { event.preventDefault(); select(); }
        const next = { ArrowDown: 1, ArrowRight: 1, ArrowUp: -1, ArrowLeft: -1 }[event.key];
        if (next) { event.preventDefault(); picture.querySelectorAll("g[role=button]")[i + next]?.focus(); }
      });
      picture.append(node);
    });
    return el("div", { class: "graph" }, el("div", { class: "lanes" }, ...lanes.map((agent) => named(agent))), picture);
  }
  /* The terms of a step's advantage, or of a token's, and its tokens, in the step's folded box. */
  async function why(said, token) {
    const more = said.querySelector("details"), box = more.lastChild, step_id = said.dataset.step, training_step = here.training_step;
    let of;
    try { of = await source.step({ step_id, training_step, token }); } catch (error) { box.replaceChildren(el("p", { class: "note" }, error.message)); return; }
    const most = largest(of.tokens.map(([, , advantage]) => advantage));
    const tokens = el("pre", { class: "tokens", tabindex: 0, role: "region", "aria-label": `Tokens of ${step_id}` }, ...of.tokens.map(([text, isSampled, advantage, logprob], j) => {
      const token = el("span", isSampled ? { class: "token", style: `background:${hue(advantage, most)}`, title: `token ${j}: advantage ${signed(advantage)}${logprob === null ? "" : `, log-probability ${number(logprob)} nats`}` } : { class: "token not-sampled", title: `token ${j}: not sampled by the policy` }, text);
      if (live && isSampled) { token.setAttribute("tabindex", "0"); token.setAttribute("role", "button"); const ask = () => go({ ...here, step: step_id, token: j }); token.addEventListener("click", ask); token.addEventListener("keydown", (e) => { if (e.key === "Enter") ask(); }); }
      return token;
    }));
    const hints = [
      `policy ${of.policy}, version ${of.policy_version}`,
      of.spelled || !of.tokens.length ? "" : "No tokenizer of this policy is in the run's checkpoints: tokens are shown as ids.",
      of.tokens.length < of.tokens_in_all ? `The first ${count(of.tokens.length)} of ${count(of.tokens_in_all)} tokens are shown.` : "",
    ].filter(Boolean).join(". ");
    box.replaceChildren(...(of.why ? [title(token === undefined ? "Why this advantage" : live ? `Why this advantage of token ${token}` : "Why the advantage of the whole step (creditflow view explains single tokens)"), el("pre", { class: "tree", tabindex: 0, role: "region", "aria-label": `Terms of the advantage of ${step_id}`, "data-part": "why" }, [...of.why, "", ...of.terms].join("\n"))] : [el("p", {}, "Credit was never assigned: too many scores had failed.")]),
      ...(of.tokens.length ? [title("Tokens, coloured by advantage"), tokens] : []), el("p", { class: "hint" }, hints));
    more.open = true;
  }

  /* ---- controls --------------------------------------------------------------------------------------------------------- */

  const first = () => { offset = 0; places = [null]; };
  $("filter").addEventListener("submit", (event) => { event.preventDefault(); first(); list(); });
  $("earlier").addEventListener("click", () => turn(-1));
  $("later").addEventListener("click", () => turn(1));
  $("heat-of").addEventListener("change", heat);
  $("metric").addEventListener("change", () => { if (told.curves[$("metric").value]) choose($("metric").value); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show(told));
  addEventListener("hashchange", visit);

  /* ---- keys --------------------------------------------------------------------------------------------------------------- */

  const listed = () => [...document.querySelectorAll("#list [data-trajectory]")];
  const nodes = () => [...$("trajectory").querySelectorAll("svg.trajectory g[data-node]")];
  function other(of, current, by) {
    const at = of.findIndex(current);
    const next = of[at < 0 ? (by > 0 ? 0 : of.length - 1) : at + by];
    if (next) { next.focus({ preventScroll: true }); next.dispatchEvent(new Event("click")); }
  }
  const keys = {
    "/": ["search", () => { $("filter").parentElement.open = true; $("filter").text.focus(); $("filter").scrollIntoView({ block: "center" }); }],
    j: ["next trajectory of the list", () => other(listed(), (row) => row.hasAttribute("aria-current"), 1)],
    k: ["previous trajectory", () => other(listed(), (row) => row.hasAttribute("aria-current"), -1)],
    l: ["next step of the trajectory", () => other(nodes(), (node) => node.hasAttribute("aria-current"), 1)],
    h: ["previous step", () => other(nodes(), (node) => node.hasAttribute("aria-current"), -1)],
    n: ["next page", () => turn(1)],
    p: ["previous page", () => turn(-1)],
    u: ["up to the list", () => { $("list").scrollIntoView({ block: "start" }); listed()[0]?.focus({ preventScroll: true }); }],
    "?": ["these keys", () => $("keys").showModal()],
  };
  $("key-list").replaceChildren(table([["key", ""], ["action", ""]], Object.entries(keys).map(([key, [what]]) => [el("kbd", {}, key), what])));
  $("show-keys").addEventListener("click", () => $("keys").showModal());
  const kept = { get: () => { try { return localStorage.getItem("creditflow-keys"); } catch { return null; } }, set: (value) => { try { localStorage.setItem("creditflow-keys", value); } catch { /* a file may have no storage */ } } };
  $("keys-on").checked = kept.get() !== "off";
  $("keys-on").addEventListener("change", () => kept.set($("keys-on").checked ? "on" : "off"));
  addEventListener("keydown", (event) => {
    const busy = event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) || $("keys").open;
    if (busy || !$("keys-on").checked || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key][1]();
  });

  /* ---- begin ------------------------------------------------------------------------------------------------------------- */

  /* Draws anew; keeps the keyboard focus, and the findings' box unfolded. */
  async function renewed(drawAll) {
    const at = document.activeElement, box = at.closest("[id]"), isOpen = $("found-out").querySelector("details")?.open;
    const drawn = drawAll(); // all but the list at once
    const folded = $("found-out").querySelector("details");
    if (folded && isOpen) folded.open = true;
    await drawn;
    if (at.isConnected || document.activeElement !== document.body) return;
    const alike = [...box.querySelectorAll(at.tagName)];
    (alike.find((one) => one.textContent === at.textContent) ?? alike[0])?.focus({ preventScroll: true });
  }
  let seen = "", visited = false;
  async function look() {
    try {
      const overview = await source.overview();
      const now = JSON.stringify([overview.run, overview.left_out, overview.findings.length, overview.events.length, Object.values(overview.curves).map((c) => c.points.length)]);
      if (now !== seen) { seen = now; await renewed(async () => { compare(); show(overview); if (offset === 0 && !wordsOf(filters().text).length) await list(); }); }
      if (!visited) { visited = true; await visit(); }
      const first = listed().find((row) => !told.run.unreadable.includes(Number(row.dataset.trainingStep)));
      if (first && !$("trajectory").hasChildNodes()) await open(first.dataset.trajectory, first.dataset.trainingStep);
      document.body.dataset.ready = "true";
    } catch (error) { $("progress").textContent = `${live ? "The server does not answer" : "This page is incomplete"}: ${error.message}`; }
    if (live) setTimeout(look, 2000);
  }
  look();
})();
