"use strict";
/* The page of the report and of the live view. The report contains its data; the view requests it from its server.
   Texts of models are inserted as text nodes only. */
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const live = data.live === true;
  const $ = (id) => document.getElementById(id);
  const palette = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c6d31", "#7f7f7f"];
  const dashes = ["solid", "dashed", "dotted", [8, 3, 2, 3]];
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
    const steps = graph.steps.map((node) => [node, data.samples.steps[`${graph.training_step} ${node.id}`]]).filter(([, of]) => of && words.every((word) => [of.prompt, of.response, of.id].some((text) => text.toLowerCase().includes(word))));
    if (!steps.length) return null;
    const [node, of] = steps[0];
    const text = [of.response, of.prompt].find((text) => text.toLowerCase().includes(words[0])) ?? of.response, from = Math.max(0, text.toLowerCase().indexOf(words[0]) - 60);
    return { index: node.index, agent: node.agent, excerpt: text.slice(from, from + 200), steps: steps.length };
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
  const number = (value, digits = 3) => (value === null || value === undefined ? "-" : Number(value).toFixed(digits));
  const signed = (value) => (value === null || value === undefined ? "-" : (value >= 0 ? "+" : "") + Number(value).toFixed(3));
  const percent = (value) => (value === null || value === undefined ? "-" : `${(100 * value).toFixed(1)} %`);
  const count = (value) => (value === null || value === undefined ? "-" : Number(value).toLocaleString("en"));
  const ended = (trajectory) => (trajectory.ended_right === null ? "-" : trajectory.ended_right ? "right" : "wrong");
  const short = (text, most) => (text && text.length > most ? `${text.slice(0, most)}…` : text || "");
  function table(columns, rows) {
    const head = el("tr", {}, ...columns.map(([name, kind]) => el("th", { class: kind, scope: "col" }, name)));
    const body = rows.map((row) => el("tr", {}, ...row.map((cell, i) => el("td", { class: columns[i][1] }, cell))));
    return el("table", {}, el("thead", {}, head), el("tbody", {}, ...body));
  }
  /* Wide content in a box of its own, which the keyboard reaches and scrolls. */
  const scroll = (content, label = "Wide content") => el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, content);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const mix = (a, b, t) => `rgb(${[0, 1, 2].map((i) => Math.round(a[i] + (b[i] - a[i]) * t)).join(",")})`;
  /* Blue above zero, orange below, pale at zero: distinct with any colour vision and by brightness. */
  function hue(value, most) {
    if (value === null || value === undefined || !most) return "rgb(235,235,235)";
    const t = Math.min(1, Math.abs(value) / most);
    return mix([244, 244, 244], value >= 0 ? [67, 147, 195] : [241, 143, 59], Math.sqrt(t));
  }

  /* ---- charts ------------------------------------------------------------------------------------------------------ */

  const drawn = new Map();
  function chart(place, option, said) {
    let made = drawn.get(place);
    if (!made) {
      made = charts.init(place, null, { renderer: "svg" });
      drawn.set(place, made);
      new ResizeObserver(() => made.resize()).observe(place);
    }
    const ink = css("--ink"), soft = css("--soft"), grid = css("--grid");
    const axis = { axisLine: { lineStyle: { color: soft } }, axisLabel: { color: soft }, nameTextStyle: { color: soft }, splitLine: { lineStyle: { color: grid } } };
    const styled = (a) => ({ ...axis, ...a, axisLabel: { ...axis.axisLabel, ...a.axisLabel } });
    made.setOption({ animation: false, aria: { enabled: true, label: { description: said } }, color: palette, textStyle: { color: ink }, ...option, xAxis: styled(option.xAxis), yAxis: styled(option.yAxis) }, true);
    place.setAttribute("role", "img");
    place.setAttribute("aria-label", said);
  }
  const title = (text) => el("h3", {}, text);
  function lines(place, name, unit, series, events) {
    const marks = events.map((event) => ({ xAxis: event.step, label: { show: false } }));
    const seen = new Map(events.map((event) => [event.step, `${event.rule} ${event.what || ""}: ${event.note || event.action || ""}`]));
    chart(place, {
      grid: { left: 62, right: 18, top: series.length > 1 ? 52 : 36, bottom: 42 },
      legend: { top: 26, type: "scroll", textStyle: { color: css("--ink") }, show: series.length > 1 },
      graphic: [], tooltip: { trigger: "axis", confine: true, renderMode: "richText", valueFormatter: (v) => (v == null ? "-" : Number(v).toPrecision(4)), formatter: (points) => [`training step ${points[0].axisValue}`, ...points.map((p) => `${p.seriesName}: ${Number(p.value[1]).toPrecision(4)}`), seen.get(points[0].axisValue) || ""].join("\n").trim() },
      xAxis: { type: "value", name: "training step", nameLocation: "middle", nameGap: 26, minInterval: 1, min: "dataMin", max: "dataMax" },
      yAxis: { type: "value", name: unit ? `${name} [${unit}]` : name, nameLocation: "end", nameTextStyle: { align: "left", color: css("--ink"), padding: [0, 0, series.length > 1 ? 22 : 0, -48] }, scale: true },
      dataZoom: [{ type: "inside" }],
      series: series.map((one, i) => ({ type: "line", name: one.name, data: one.points, symbol: one.points.length > 60 ? "none" : "circle", symbolSize: 4, lineStyle: { width: 1.8, type: dashes[Math.floor(i / palette.length) % dashes.length] }, markLine: i === 0 && marks.length ? { silent: true, symbol: "none", lineStyle: { color: css("--bad"), type: "dotted" }, data: marks } : undefined })),
    }, `${name}${unit ? ` in ${unit}` : ""} by training step: ${series.map((s) => `${s.name} from ${number(s.points[0]?.[1])} to ${number(s.points.at(-1)?.[1])}`).join("; ")}`);
  }
  function into(box, id) {
    let place = box.querySelector(`[data-chart="${CSS.escape(id)}"]`);
    if (!place) { place = el("div", { class: "chart", "data-chart": id }); box.append(place); }
    return place;
  }

  /* ---- the run as a whole ------------------------------------------------------------------------------------------- */

  const SHOWN = ["val/pass_at_1", "train/pass_at_1", "val/step_error_rate", "actor/entropy", "actor/grad_norm", "reward/error_rate", "propagation/pass_rate", "throughput/tokens_per_s"];
  let told = null;
  function curve(box, name) {
    const of = told.curves[name];
    if (!of) return;
    const others = (data.comparison ? data.comparison.runs : []).filter((run) => run.curves[name]);
    const series = data.comparison ? others.map((run) => ({ name: run.name, points: run.curves[name].points })) : [{ name, points: of.points }];
    lines(into(box, name), name, of.unit, series, told.events);
  }
  function show(overview) {
    told = overview;
    const run = told.run, last = (name) => told.curves[name]?.points.at(-1)?.[1];
    $("title").textContent = `creditflow: ${run.name}`;
    $("facts").textContent = [run.recipe, run.engine && `engine ${run.engine}`, run.rule, run.seed !== undefined && `seed ${run.seed}`, run.started && `started ${run.started}`, run.recredited_from && `recredited: ${JSON.stringify(run.changed)}`, live && `live, ${run.indexed} of ${run.training_steps} training steps indexed`].filter(Boolean).join(" · ");
    const tiles = [["training steps", count(run.training_steps)], ["trajectories", count(run.trajectories)], ["steps", count(run.steps)], ["trajectories that ended right", percent(run.ended_right)], ["val pass@1, last", number(last("val/pass_at_1"))], ["step errors, last validation", number(last("val/step_error_rate"))], ["guard events", count(told.events.length)]];
    findings();
    $("left-out").replaceChildren(...told.left_out.map((text) => el("p", { class: "note" }, el("b", {}, "Incomplete: "), text)));
    $("tiles").replaceChildren(...tiles.filter(([, v]) => v !== "-").map(([name, value]) => el("div", { class: "tile" }, el("b", {}, value), el("span", {}, name))));
    const notes = [
      ...told.notices.map((text) => el("p", { class: "note" }, text)),
    ];
    const events = told.events.slice(-50).reverse().map((e) => [String(e.step), e.rule, e.what || "", e.metric || "", e.note || e.action || ""]);
    if (events.length) notes.push(title("Guard events"), scroll(table([["step", "n"], ["rule", ""], ["", ""], ["metric", ""], ["action", ""]], events)));
    $("notes").replaceChildren(...notes);
    for (const name of SHOWN) curve($("charts"), name);
    $("metrics").replaceChildren(...Object.keys(told.curves).map((name) => el("option", { value: name })));
    agents();
    const rows = told.hardest.map((t) => [el("button", { class: "link", type: "button", onclick: () => go({ trajectory: t.trajectory_id, training_step: t.training_step }) }, short(t.prompt, 160)), count(t.trajectories), percent(t.ended_right), number(t.first_error, 1)]);
    $("hardest").replaceChildren(table([["task", "text"], ["trajectories", "n"], ["ended right", "n"], ["first error at step, mean", "n"]], rows));
    const chosen = $("filter").agent, before = chosen.value;
    chosen.replaceChildren(el("option", { value: "" }, "any"), ...told.agents.map((a) => el("option", { value: a.agent }, a.agent)));
    chosen.value = before;
  }
  function findings() {
    const known = told.findings.filter((one) => one.kind !== "unknown"), unknown = told.findings.filter((one) => one.kind === "unknown");
    const links = (one) => [
      one.metric && told.curves[one.metric] ? el("a", { href: `#${query({ curve: one.metric })}`, "data-metric": one.metric }, one.metric) : null,
      one.trajectory ? el("a", { href: addressOf({ trajectory: one.trajectory[0], training_step: one.trajectory[1] }) }, `trajectory ${one.trajectory[0]}`) : null,
    ].filter(Boolean);
    const item = (one) => el("li", { class: `finding ${one.kind}`, "data-about": one.about }, el("p", { class: "sentence" }, one.sentence),
      el("p", { class: "evidence" }, one.evidence.join("; "), ...links(one).flatMap((link) => [" · ", link])),
      ...(one.change ? [el("p", { class: "change" }, "Try ", el("code", {}, one.change.setting), `: ${one.change.reason}.`)] : []));
    const missing = unknown.length ? [el("details", {}, el("summary", {}, `${unknown.length} ${unknown.length === 1 ? "question" : "questions"} without enough data`), el("ul", {}, ...unknown.map((one) => el("li", { "data-about": one.about }, one.sentence)))) ] : [];
    const none = known.length ? [] : [el("p", { class: "hint" }, unknown.length ? "Nothing can be claimed of this run yet." : "No problem was found.")];
    $("found-out").replaceChildren(...none, el("ul", { class: "findings" }, ...known.map(item)), ...missing);
  }
  function agents() {
    const gated = told.agents.some((a) => a.threshold !== null), of_gates = (...columns) => (gated ? columns : []);
    const columns = [["agent", ""], ["steps", "n"], ["scored", "n"], ["mean sub-reward", "n"], ["wrong", "n"], ...of_gates(["pass rate", "n"], ["threshold", "n"]), ["mean credit", "n"], ["share of credit", "n"], ...of_gates(["withheld at gates", "n"]), ["wrong but rewarded", "n"], ["right but blamed", "n"]];
    const rows = told.agents.map((a) => [a.agent, count(a.steps), percent(a.scored), number(a.sub_reward), percent(a.error_rate), ...of_gates(percent(a.pass_rate), number(a.threshold, 2)), signed(a.credit), percent(a.share), ...of_gates(number(a.withheld, 1)), percent(a.wrong_rewarded), percent(a.right_blamed)]);
    $("of-agents").replaceChildren(table(columns, rows));
    $("filter").gate.parentElement.hidden = !gated;
    if (!gated) $("filter").gate.value = "";
    const words = { credit: ["mean credit", ""], pass_rate: ["gates open", "share"], threshold: ["threshold", ""], sub_reward: ["mean sub-reward", ""] };
    for (const [key, [name, unit]] of Object.entries(words)) {
      const series = Object.entries(told.series).filter(([, of]) => of[key].length).map(([agent, of]) => ({ name: agent, points: of[key] }));
      if (series.length) lines(into($("agent-charts"), key), name, unit, series, told.events);
    }
    tables();
    heat();
    const { edges, agents: counts } = told.advantages;
    const middle = edges.slice(1).map((edge, i) => Number(((edge + edges[i]) / 2).toPrecision(3)));
    chart($("advantages"), {
      grid: { left: 70, right: 18, top: 52, bottom: 42 }, legend: { top: 24, type: "scroll", textStyle: { color: css("--ink") } }, tooltip: { trigger: "axis", confine: true, renderMode: "richText" },
      xAxis: { type: "category", name: "advantage (outermost bins hold what lies beyond)", nameLocation: "middle", nameGap: 26, data: middle },
      yAxis: { type: "value", name: "steps", nameTextStyle: { align: "left" } },
      series: Object.entries(counts).map(([agent, of]) => ({ type: "bar", stack: "all", name: agent, data: of })),
    }, `Distribution of advantages by agent, from ${number(edges[0])} to ${number(edges.at(-1))}`);
  }
  function tables() {
    $("more-tables").replaceChildren(...told.tables.flatMap((of) => [title(of.title), scroll(table(of.columns, of.rows), `Table: ${of.title}`)]));
    for (const of of told.tables) if (of.chart) lines(into($("agent-charts"), of.title), of.chart, of.unit, Object.entries(of.curves).map(([name, metric]) => ({ name, points: told.curves[metric].points })), told.events);
  }
  function heat() {
    const key = $("heat-of").value, of = told.heat.filter((cell) => cell[key] !== null);
    const names = [...new Set(told.heat.map((c) => c.agent))], turns = [...new Set(told.heat.map((c) => c.turn))].sort((a, b) => a - b);
    const most = Math.max(1e-9, ...of.map((c) => Math.abs(c[key]))), shares = key === "error_rate";
    chart($("heat"), {
      grid: { left: 110, right: 90, top: 20, bottom: 48 }, tooltip: { confine: true, renderMode: "richText", formatter: (p) => `${names[p.value[1]]}, turn ${turns[p.value[0]]}\n${$("heat-of").selectedOptions[0].text}: ${number(p.value[2])}\n${count(p.value[3])} steps` },
      visualMap: { min: shares ? 0 : -most, max: shares ? Math.max(most, 1e-9) : most, calculable: true, orient: "vertical", right: 0, top: "middle", itemHeight: 130, precision: 2, textStyle: { color: css("--soft") }, inRange: { color: shares ? ["#f4f4f4", "#f18f3b", "#8c3a00"] : ["#c35a00", "#f18f3b", "#f4f4f4", "#4393c3", "#1f5f99"] }, dimension: 2 },
      xAxis: { type: "category", name: "turn of the agent", nameLocation: "middle", nameGap: 28, data: turns },
      yAxis: { type: "category", data: names },
      series: [{ type: "heatmap", data: of.map((c) => [turns.indexOf(c.turn), names.indexOf(c.agent), c[key], c.steps]) }],
    }, `${$("heat-of").selectedOptions[0].text} by agent and turn, at most ${number(most)} away from zero`);
  }
  function compare() {
    if (!data.comparison) return;
    $("comparison").hidden = false;
    document.querySelector('nav a[href="#comparison"]').hidden = false;
    const sides = data.comparison.runs, names = sides.map((run) => [run.name, "n"]);
    const settings = Object.entries(data.comparison.settings).map(([key, values]) => [key, ...values.map((v) => JSON.stringify(v))]);
    const metrics = ["val/pass_at_1", "val/pass_at_1_greedy", "val/step_error_rate", "train/pass_at_1", "propagation/pass_rate", "reward/error_rate", "actor/entropy"].filter((name) => sides.some((run) => run.curves[name]));
    const shares = [...new Set(sides.flatMap((run) => run.agents.map((a) => a.agent)))].flatMap((agent) => [["mean credit", "credit", signed], ["gates open", "pass_rate", percent], ["wrong but rewarded", "wrong_rewarded", percent]].filter(([, key]) => key !== "pass_rate" || sides.some((run) => run.agents.some((a) => a.threshold !== null))).map(([words, key, shown]) => [`${agent}: ${words}`, ...sides.map((run) => shown(run.agents.find((a) => a.agent === agent)?.[key]))]));
    $("compared").replaceChildren(
      title("Rules"), scroll(table([["", ""], ...names], [["rule", ...sides.map((run) => run.rule || "-")]])),
      title("Settings that differ"), scroll(table([["setting", ""], ...names], settings)),
      title("Last of each run"), scroll(table([["metric", ""], ...names], metrics.map((name) => [name, ...sides.map((run) => number(run.curves[name]?.points.at(-1)?.[1]))]))),
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
      $("found").textContent = none ? (told.left_out.length ? `no ${what} can be shown: the notices at the top say why` : `no ${what}: none is on record yet`) : page.total ? `${count(page.total)} ${what}; ${count(offset + 1)} to ${count(offset + page.trajectories.length)} shown` : `no ${what} like that`;
    }
    const match = (p) => el("a", { href: addressOf({ trajectory: p.trajectory_id, training_step: p.training_step, at: p.match.index }) }, `step ${p.match.index}, ${p.match.agent}`);
    const rows = page.trajectories.map((p) => [el("button", { class: "link", type: "button", "data-trajectory": p.trajectory_id, "data-training-step": p.training_step, onclick: () => go({ trajectory: p.trajectory_id, training_step: p.training_step }) }, p.trajectory_id), String(p.training_step), ...(isSearch ? [el("div", {}, match(p), `: ${p.match.excerpt}`)] : [short(p.prompt, 110)]), count(p.n_steps), ended(p), p.first_error === null ? "-" : String(p.first_error), p.status]);
    const columns = [["trajectory", ""], ["training step", "n"], [isSearch ? "match" : "task", "text"], ["steps", "n"], ["ended", ""], ["first error at", "n"], ["status", ""]];
    $("list").replaceChildren(...(rows.length ? [table(columns, rows)] : []));
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
  async function visit() {
    const place = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
    if (place.curve) { if (told.curves[place.curve]) { curve($("chosen"), place.curve); $("metric").value = place.curve; into($("chosen"), place.curve).scrollIntoView({ block: "center" }); } return; }
    if (!place.trajectory && !place.step) return;
    const same = here.trajectory === place.trajectory && here.training_step === place.training_step;
    let id = place.trajectory;
    if (!id) {
      const known = $("trajectory").querySelector(`[data-step="${CSS.escape(place.step)}"]`);
      if (!known || here.training_step !== place.training_step) {
        try { id = (await source.step({ step_id: place.step, training_step: place.training_step })).trajectory_id; } catch (error) { $("trajectory").replaceChildren(el("p", { class: "note" }, error.message)); return; }
      }
    }
    if (id && !same) {
      const shown = await open(id, place.training_step, !place.step && place.at === undefined);
      here = { trajectory: id, training_step: place.training_step };
      if (!shown) return;
    }
    if (same && !place.step) $("step").replaceChildren();
    if (place.at !== undefined) $("trajectory").querySelectorAll("svg.trajectory g[role=button]")[Number(place.at)]?.dispatchEvent(new Event("click"));
    if (place.step) { mark(place.step); await step(place.step, place.training_step, place.token); }
  }
  function mark(id) {
    const node = document.querySelector(`#trajectory g[data-step="${CSS.escape(id)}"]`);
    if (!node) return;
    for (const other of document.querySelectorAll("#trajectory g[data-step][aria-current]")) other.removeAttribute("aria-current");
    node.setAttribute("aria-current", "true");
  }

  /* ---- one trajectory ---------------------------------------------------------------------------------------------------- */

  const hasGate = (step) => step.gate_open !== null && step.gate_open !== undefined;
  async function open(trajectory_id, training_step, moves) {
    const box = $("trajectory");
    let graph;
    $("step").replaceChildren();
    try { graph = await source.trajectory({ trajectory_id, training_step }); } catch (error) { box.replaceChildren(el("p", { class: "note" }, error.message)); return false; }
    const facts = [`training step ${graph.training_step}`, graph.status, `outcome ${graph.outcome === null ? graph.outcome_said : graph.outcome}`, ...Object.entries(graph.outcomes).map(([agent, own]) => `outcome of ${agent} ${own}`), `expected ${graph.ground_truth}`, `answer ${graph.answer ?? "-"}`];
    box.replaceChildren(title(`Trajectory ${graph.trajectory_id}`), el("p", {}, short(facts.join(" · "), 600)), el("pre", { tabindex: 0, role: "region", "aria-label": "Task" }, graph.task),
      el("p", { class: "hint" }, "Circles are steps, coloured by credit ", el("span", { class: "whole" }, "(", el("span", { class: "legend", style: "background:linear-gradient(to right,rgb(241,143,59),rgb(244,244,244),rgb(67,147,195))" }), " blame to praise)"), graph.edges.some((e) => e.flow) ? "; a line is as thick as the credit that flowed back along it" : "", graph.steps.some(hasGate) ? "; a bar across a line is a closed gate" : "", "; a double ring is the first error. Select a step for its texts and for where its advantage came from."),
      keepNames(scroll(draw(graph))));
    $("told").textContent = `trajectory ${graph.trajectory_id} is shown: ${graph.steps.length} steps`;
    if (moves) box.scrollIntoView({ block: "start" });
    return true;
  }
  function draw(graph) {
    const lanes = [...new Set(graph.steps.map((s) => s.agent))], left = 120, dx = 62, dy = 74, top = 40;
    const x = (i) => left + 30 + i * dx, y = (i) => top + lanes.indexOf(graph.steps[i].agent) * dy;
    const most = Math.max(1e-9, ...graph.steps.map((s) => Math.abs(s.credit ?? 0))), flow = Math.max(1e-9, ...graph.edges.map((e) => Math.abs(e.flow ?? 0)));
    const picture = svg("svg", { class: "trajectory", width: x(graph.steps.length - 1) + 50, height: top + lanes.length * dy, role: "group", "aria-label": `Graph of ${graph.steps.length} steps of ${lanes.length} agents` });
    for (const edge of graph.edges) {
      const [x1, y1, x2, y2] = [x(edge.parent), y(edge.parent), x(edge.child), y(edge.child)];
      const bend = y1 === y2 && edge.child - edge.parent > 1 ? -26 - 4 * (edge.child - edge.parent) : 0;
      const known = edge.flow !== null, still = !known || Math.abs(edge.flow) < 1e-12;
      const shut = edge.open < 0.5, size = known ? Math.abs(edge.flow) / flow : 0;
      const path = svg("path", { d: `M${x1},${y1} Q${(x1 + x2) / 2},${(y1 + y2) / 2 + bend} ${x2},${y2}`, fill: "none", stroke: still ? css("--soft") : edge.flow > 0 ? css("--good") : css("--bad"), "stroke-width": 1 + 7 * size, "stroke-opacity": still ? 0.45 : 0.8, "stroke-dasharray": shut ? "3 4" : "none", "data-flow": known ? edge.flow : "unknown" });
      path.append(svg("title", {}, `${known ? `${signed(edge.flow)} flowed` : "an unknown credit"} from step ${edge.child} to step ${edge.parent}${shut ? "; the gate is closed" : ""}`));
      picture.append(path);
      if (shut) {
        const a = Math.atan2(y2 - (y1 + y2) / 2 - bend, x2 - (x1 + x2) / 2), bx = x2 - 25 * Math.cos(a), by = y2 - 25 * Math.sin(a), s = Math.sin(a) * 9, c = Math.cos(a) * 9;
        picture.append(svg("line", { class: "gate", x1: bx - s, y1: by + c, x2: bx + s, y2: by - c, stroke: css("--ink"), "stroke-width": 3 }));
      }
    }
    graph.steps.forEach((s, i) => {
      const said = `step ${s.index}, ${s.agent}: score ${s.failed ? "failed" : number(s.sub_reward, 2)}, ${hasGate(s) ? `gate ${s.gate_open ? "open" : "closed"}, ` : ""}credit ${signed(s.credit)}, advantage ${s.trained === false ? "masked" : signed(s.advantage)}${s.first_error ? ", first error" : ""}`;
      const node = svg("g", { tabindex: 0, role: "button", "data-step": s.id, transform: `translate(${x(i)},${y(i)})` });
      if (s.first_error) node.append(svg("circle", { r: 20, fill: "none", stroke: css("--bad"), "stroke-width": 2 }));
      node.append(svg("circle", { r: 15.5, fill: hue(s.credit, most), stroke: css("--ink"), "stroke-width": s.trained === false ? 0.6 : 1.4, "stroke-dasharray": s.trained === false ? "2 2" : "none" }), svg("text", { "text-anchor": "middle", y: 4, style: "fill:#111" }, String(s.index)), svg("text", { "text-anchor": "middle", y: 33 }, s.failed ? "failed" : s.sub_reward == null ? "" : number(s.sub_reward, 2)), svg("title", {}, `${said}\n${s.response}`));
      const select = () => { mark(s.id); go(within({ step: s.id })); };
      node.addEventListener("click", select);
      node.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") { event.preventDefault(); select(); }
        const next = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (next) { event.preventDefault(); picture.querySelectorAll("g[role=button]")[i + next]?.focus(); }
      });
      picture.append(node);
    });
    lanes.forEach((agent, i) => picture.append(svg("text", { class: "lane", x: 10, y: top + i * dy + 4 }, short(agent, 16))));
    return picture;
  }
  /* In a graph wider than the page the agents' names stay in view: above their row, so that they cover no step. */
  function keepNames(box) {
    box.addEventListener("scroll", () => {
      for (const name of box.querySelectorAll("svg.trajectory > .lane")) name.setAttribute("transform", `translate(${box.scrollLeft},${box.scrollLeft > 10 ? -25 : 0})`);
    });
    return box;
  }
  async function step(step_id, training_step, token) {
    let of;
    try { of = await source.step({ step_id, training_step, token }); } catch (error) { $("step").replaceChildren(el("p", { class: "note" }, error.message)); return; }
    const most = Math.max(1e-9, ...of.tokens.map((t) => Math.abs(t.advantage)));
    const scores = of.scores.map((s) => [s.name, s.status === "ok" ? (s.by_token ? "by token" : String(s.value)) : s.status, s.weight === 0 ? "0: not part of credit" : String(s.weight), s.reason]);
    const tokens = el("pre", { class: "tokens", tabindex: 0, role: "region", "aria-label": "Tokens" }, ...of.tokens.map((t, j) => {
      const token = el("span", t.sampled ? { class: "token", style: `background:${hue(t.advantage, most)}`, title: `token ${j}: advantage ${signed(t.advantage)}${t.logprob === null ? "" : `, log-probability ${number(t.logprob)}`}` } : { class: "token not-sampled", title: `token ${j}: not sampled by the policy` }, t.text);
      if (live && t.sampled) { token.setAttribute("tabindex", "0"); token.setAttribute("role", "button"); const ask = () => go(within({ step: step_id, training_step, token: j })); token.addEventListener("click", ask); token.addEventListener("keydown", (e) => { if (e.key === "Enter") ask(); }); }
      return token;
    }));
    const hints = [
      of.spelled ? "" : "No tokenizer of this policy is in the run's checkpoints: tokens are shown as ids.",
      of.tokens.length < of.tokens_in_all ? `The first ${count(of.tokens.length)} of ${count(of.tokens_in_all)} tokens are shown.` : "",
    ].filter(Boolean).map((text) => el("p", { class: "hint" }, text));
    $("told").textContent = `step ${of.id} of ${of.agent} is shown`;
    $("step").replaceChildren(el("h3", {}, `Step ${of.id}: ${of.agent}, turn ${of.turn} `, el("a", { class: "own-address", href: addressOf({ step: step_id, training_step }), "aria-label": "Link to this step" }, "#")), el("p", { class: "hint" }, `policy ${of.policy}, version ${of.policy_version}`),
      scores.length ? scroll(table([["function", ""], ["value", "n"], ["weight", "n"], ["reason", "text"]], scores), "Table: Scores") : el("p", {}, "No reward function scored this step."),
      title("Prompt"), el("pre", { tabindex: 0, role: "region", "aria-label": "Prompt", "data-part": "prompt" }, of.prompt), title("Response"), el("pre", { tabindex: 0, role: "region", "aria-label": "Response", "data-part": "response" }, of.response),
      ...(of.tokens.length ? [title("Tokens, coloured by advantage"), ...hints, tokens] : []),
      ...(of.why ? [title(token === undefined ? "Why this advantage" : `Why this advantage of token ${token}`), el("pre", { class: "tree", tabindex: 0, role: "region", "aria-label": "Terms of the advantage", "data-part": "why" }, [...of.why, "", ...of.terms].join("\n"))] : [el("p", {}, "Credit was never assigned: too many scores had failed.")]));
  }

  /* ---- controls --------------------------------------------------------------------------------------------------------- */

  const first = () => { offset = 0; places = [null]; };
  $("filter").addEventListener("submit", (event) => { event.preventDefault(); first(); list(); });
  $("earlier").addEventListener("click", () => turn(-1));
  $("later").addEventListener("click", () => turn(1));
  $("heat-of").addEventListener("change", heat);
  $("metric").addEventListener("change", () => { if (told.curves[$("metric").value]) curve($("chosen"), $("metric").value); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show(told));
  addEventListener("hashchange", visit);

  /* ---- keys --------------------------------------------------------------------------------------------------------------- */

  const listed = () => [...document.querySelectorAll("#list [data-trajectory]")];
  const nodes = () => [...$("trajectory").querySelectorAll("svg.trajectory g[data-step]")];
  function other(of, current, by) {
    const at = of.findIndex(current);
    const next = of[at < 0 ? (by > 0 ? 0 : of.length - 1) : at + by];
    if (next) { next.focus({ preventScroll: true }); next.dispatchEvent(new Event("click")); }
  }
  const keys = {
    "/": ["search", () => { $("filter").text.focus(); $("filter").scrollIntoView({ block: "center" }); }],
    j: ["next trajectory of the list", () => other(listed(), (row) => row.dataset.trajectory === here.trajectory && row.dataset.trainingStep === here.training_step, 1)],
    k: ["previous trajectory", () => other(listed(), (row) => row.dataset.trajectory === here.trajectory && row.dataset.trainingStep === here.training_step, -1)],
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

  let seen = "", visited = false;
  async function look() {
    try {
      const overview = await source.overview();
      const now = JSON.stringify([overview.run, overview.left_out, overview.findings.length, overview.events.length, Object.values(overview.curves).map((c) => c.points.length)]);
      if (now !== seen) { seen = now; compare(); show(overview); if (offset === 0 && !wordsOf(filters().text).length) await list(); }
      if (!visited) { visited = true; await visit(); }
      document.body.dataset.ready = "true";
    } catch (error) { $("facts").textContent = `The server does not answer: ${error.message}`; }
    if (live) setTimeout(look, 2000);
  }
  look();
})();
