"""The command line: commands, options and exit codes.

Each command imports its heavy modules when it runs. Exit codes: 0 success; 1 failure; 2 wrong input; 130 interrupted.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from creditflow.errors import CreditflowError, InputError, says_disk_full

if TYPE_CHECKING:
    from creditflow._utils.progress import Reporter

Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe (YAML).", show_default=False)]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Options of the recipe to set.", show_default=False)
]


class _Commands(TyperGroup):
    """Command group that turns a `CreditflowError` or a full disk into one line and an exit code.

    Other errors keep their traceback.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except CreditflowError as error:
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
            raise typer.Exit(2 if isinstance(error, InputError) else 1) from error
        except OSError as error:
            if not says_disk_full(error):
                raise
            where = f": {error.filename}" if error.filename else ""
            print(f"error: the disk is full{where}; finished files are whole", file=sys.stderr)
            raise typer.Exit(1) from error
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(130) from None


_AFTER_DASHES = "creditflow.after_dashes"
"""Key in `ctx.meta` of the arguments after `--`; absent if the command line has no `--`."""


class _WithDashes(TyperCommand):
    """Command that keeps the arguments after `--` apart; click would merge them with the others."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[_AFTER_DASHES] = args[at + 1 :]
            args = args[:at]
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[--\xa0VERL_KEY=VALUE...]"]


app = typer.Typer(
    cls=_Commands,
    help="Train teams of LLM agents, and decide for every step of every agent how much of the reward it earned.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
data_app = typer.Typer(help="Turn published data sets into verl-schema Parquet.", no_args_is_help=True)
app.add_typer(data_app, name="data")
sandbox_app = typer.Typer(help="Boxes for programs that nobody trusts.", no_args_is_help=True)
app.add_typer(sandbox_app, name="sandbox")
guard_app = typer.Typer(help="Rules that watch a run.", no_args_is_help=True)
app.add_typer(guard_app, name="guard")


@app.command(cls=_WithDashes)
def train(
    context: typer.Context,
    recipe: Recipe,
    overrides: Overrides = None,
    *,
    engine: Annotated[
        str, typer.Option(help="Where training runs: local, in this process; verl, on a Ray cluster.")
    ] = "local",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print verl's configuration, checked by verl, and start nothing.")
    ] = False,
) -> None:
    """Train as a recipe says.

    With --engine verl, what follows -- is verl's own, in Hydra's language: key=value, +key=value, ~key.
    """
    from creditflow.cli.train import train

    after_dashes = context.meta.get(_AFTER_DASHES)
    train(recipe, overrides or [], engine, _reporter(), verl_overrides=after_dashes, dry_run=dry_run)


@app.command()
def compare(
    recipe: Recipe,
    overrides: Overrides = None,
    *,
    vary: Annotated[str, typer.Option(metavar="KEY=A,B,C", help="The option to vary, and its values.")],
    seeds: Annotated[int, typer.Option(help="Runs of each arm: seeds data.seed, data.seed + 1, ...")] = 1,
    jobs: Annotated[
        int | None, typer.Option(help="Runs side by side; default: one a core.", show_default=False)
    ] = None,
    arms: Annotated[bool, typer.Option(help="Also run the recipe's compare.arms.")] = True,
    only: Annotated[str, typer.Option(metavar="A,B", help="Run these arms alone.", show_default=False)] = "",
) -> None:
    """Train a recipe several ways with the same seeds, and tell how sure the difference is.

    A value may carry overrides of its own (compare.values.VALUE in the recipe). Everything goes into
    trainer.default_local_dir; where that holds finished runs of this comparison already, they are not repeated.
    """
    from creditflow.cli.compare import compare

    chosen = [name.strip() for name in only.split(",") if name.strip()]
    compare(recipe, overrides or [], vary=vary, seeds=seeds, jobs=jobs, extra=arms, only=chosen, reporter=_reporter())


@app.command("eval")
def evaluate(
    recipe: Recipe,
    overrides: Overrides = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the numbers here, task by task.")
    ] = None,
) -> None:
    """Evaluate a model on a recipe's validation tasks.

    The model is the recipe's; actor_rollout_ref.model.path=FOLDER evaluates another one, a checkpoint for instance.
    """
    from creditflow.cli.evaluate import evaluate

    evaluate(recipe, overrides or [], json, _reporter())


@app.command()
def check(
    recipe: Recipe,
    overrides: Overrides = None,
    tasks: Annotated[int, typer.Option(min=1, help="Number of tasks.")] = 4,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print the resolved configuration, too.")] = False,
) -> None:
    """Validate recipe, data, rewards and groups on a few tasks, without training."""
    from creditflow.cli.check import check

    check(recipe, overrides or [], tasks, _reporter(), verbose=verbose)


@app.command()
def simulate(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Options of credit (algorithm.*) to set.", show_default=False),
    ] = None,
    *,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a trajectory.")] = 13,
    graph: Annotated[
        str, typer.Option(help="chain, tree, full; or a JSON file: for each step the list of those it uses.")
    ] = "chain",
    agents: Annotated[str, typer.Option(metavar="A,B", help="The first makes the first step, the others the rest.")] = (
        "planner,executor,verifier"
    ),
    error: Annotated[float, typer.Option(help="How often a step errs on right input.")] = 0.1,
    errors: Annotated[str, typer.Option(metavar="A=P,B=P", help="The same, of single agents.")] = "",
    self_conditioning: Annotated[float, typer.Option(help="How much more often it errs on wrong input.")] = 0.0,
    recovery: Annotated[float, typer.Option(help="How often a step makes a right output of wrong input.")] = 0.0,
    noise: Annotated[float, typer.Option(help="Share of verdicts that are mistaken.")] = 0.0,
    votes: Annotated[int, typer.Option(min=1, help="Verdicts that a score is the mean of; 1: binary scores.")] = 8,
    scored: Annotated[str, typer.Option(metavar="A,B", help="The agents that are scored; default: all.")] = "",
    inherits: Annotated[
        bool, typer.Option("--inherits", help="Scores are of outputs, upstream errors included.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of all that is drawn.")] = 0,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw a figure (PNG).")] = None,
) -> None:
    """How errors, and blame for them, travel through a chain or graph of agents, under each rule of credit.

    Trajectories are drawn at random; credit is computed by the code that training uses.
    """
    from creditflow.cli.simulate import shares_of, simulate, team_of

    team = team_of(
        graph,
        steps=steps,
        agents=tuple(name.strip() for name in agents.split(",") if name.strip()),
        error=error,
        errors=shares_of(errors, "--errors"),
        self_conditioning=self_conditioning,
        recovery=recovery,
        noise=noise,
        votes=votes,
        scored=tuple(name.strip() for name in scored.split(",") if name.strip()) or None,
        inherits=inherits,
        seed=seed,
    )
    simulate(team, overrides or [], plot, _reporter())


@app.command()
def why(
    run: Run,
    step: Annotated[str | None, typer.Argument(metavar="STEP", help="The id of a step.", show_default=False)] = None,
    *,
    token: Annotated[
        int | None, typer.Option(metavar="J", help="A token of its response, from 0.", show_default=False)
    ] = None,
    trajectory: Annotated[
        str | None, typer.Option(metavar="T", help="Show this trajectory instead, one line a step.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="The operations and terms of a step as JSON.")] = False,
) -> None:
    """Explain the advantage of a step, term by term; the last line is the number that was trained on.

    Without STEP: a list of steps that are worth a look, with their ids.
    """
    from creditflow.cli.why import why_run, why_step, why_trajectory

    if step is not None and trajectory is not None:
        raise InputError("why: expected the id of a step or --trajectory T, got both")
    if step is None and (token is not None or json):
        raise InputError(f"{'--token' if token is not None else '--json'}: expected the id of a step beside it")
    if trajectory is not None:
        why_trajectory(run, trajectory)
    elif step is not None:
        why_step(run, step, token, as_json=json)
    else:
        why_run(run)


@app.command()
def recredit(
    run: Run,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Options of credit (algorithm.*) to set.", show_default=False),
    ] = None,
    *,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FOLDER", help="Default: RUN/recredited/KEY=VALUE.", show_default=False),
    ] = None,
) -> None:
    """Assign the credit of a run's trajectories again under other settings, and say how much of it moved.

    Writes the new assignment as a run of its own, for why, diff, report and view.
    """
    from creditflow.cli.recredit import recredit

    recredit(run, overrides or [], out, _reporter())


@app.command()
def diff(
    first: Annotated[Path, typer.Argument(metavar="RUN", help="A run, or an assignment.", show_default=False)],
    second: Annotated[Path, typer.Argument(metavar="RUN", help="Another one.", show_default=False)],
) -> None:
    """What two runs, or two assignments of one run, have different: settings, credit, metrics."""
    from creditflow.cli.diff import diff

    diff(first, second, _reporter())


@app.command()
def calibrate(
    run: Run,
    *,
    last: Annotated[
        int | None, typer.Option(min=1, help="Look at so many training steps only.", show_default=False)
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw reliability curves (PNG).")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the numbers here.")] = None,
) -> None:
    """How well each sub-reward foretells the outcome, and the threshold that would separate best, per agent."""
    from creditflow.cli.calibrate import calibrate_run

    calibrate_run(run, last, plot, json, _reporter())


@app.command()
def audit(
    run: Run,
    *,
    training_step: Annotated[
        int | None,
        typer.Option(
            min=1, help="Whose trajectories; default: the last that a checkpoint is near.", show_default=False
        ),
    ] = None,
    rollouts: Annotated[int, typer.Option(min=1, help="Rollouts for each trajectory, at most.")] = 28,
    budget: Annotated[int, typer.Option(min=1, help="Rollouts in all, at most.")] = 4000,
    rule: Annotated[
        list[str] | None,
        typer.Option(metavar="RULE", help="Its name, or options of credit in quotes; repeat it.", show_default=False),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Who answers anew; default: a checkpoint.", show_default=False)
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Who stands in; default: where training began.", show_default=False),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw the correlations (PNG).")] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the numbers here.")] = None,
) -> None:
    """Measure whether credit goes to the agents that make the difference, by rollouts without each of them."""
    from creditflow.cli.audit import AuditOptions, audit

    asked = AuditOptions(training_step, rollouts, budget, model, baseline, tuple(rule or ()))
    audit(run, asked, plot, json, _reporter())


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="A run, and up to three to compare it with.")],
    *,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The HTML file.")] = Path("report.html"),
    samples: Annotated[int, typer.Option(min=0, max=10_000, help="Number of sample trajectories.")] = 10,
) -> None:
    """A run as one HTML file that needs no network: curves, agents, credit as it flowed, why of each sampled step."""
    from creditflow.cli.report import report

    report(runs, out, samples, _reporter())


@app.command()
def view(
    run: Run,
    *,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 8321,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Let --host be one that other machines can reach.")
    ] = False,
) -> None:
    """The report, live, in a browser: follows a running training, and shows all trajectories. Writes nothing."""
    from creditflow.cli.view import view

    view(run, host, port, remote=allow_remote, reporter=_reporter())


@app.command()
def convert(
    spans: Annotated[
        list[Path],
        typer.Argument(
            metavar="SPANS...",
            help="OpenTelemetry's spans and log records (OTLP), Agent Lightning's, logs of chats, or our own Parquet.",
            show_default=False,
        ),
    ],
    *,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The Parquet file to write.")],
    agent_match: Annotated[
        str, typer.Option(metavar="REGEX", help="Leave out calls of other agents.", show_default=False)
    ] = "",
    outcome: Annotated[
        str, typer.Option(metavar="NAME", help="The reward that is the outcome.", show_default=False)
    ] = "",
    range: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=LOW:HIGH", help="What a reward may be; default 0:1.", show_default=False),
    ] = None,
    trajectory_by: Annotated[
        str,
        typer.Option(
            metavar="KEY", help="The attribute that tells trajectories apart; default: the trace.", show_default=False
        ),
    ] = "",
    uid_by: Annotated[
        str,
        typer.Option(
            metavar="KEY", help="The attribute that names the task; default: the first prompt.", show_default=False
        ),
    ] = "",
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="For steps whose trace has no token ids.", show_default=False),
    ] = None,
    left_out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write here what is no step and nobody's reward.", show_default=False),
    ] = None,
    credit: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Also assign the trajectories' credit, as a run: for why, recredit, report and view.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Turn traces of other systems into trajectories: each model call is a step, or is said to be left out, and why."""
    from creditflow.cli.convert import convert_files
    from creditflow.traces import ConvertOptions

    options = ConvertOptions(agent_match, outcome, {}, trajectory_by, uid_by)
    convert_files(spans, out, options, range or [], tokenizer, left_out, credit, _reporter())


@app.command()
def serve(
    recipe: Recipe,
    overrides: Overrides = None,
    *,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Where trajectories are written.")] = Path(
        "trajectories"
    ),
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 8322,
    idle: Annotated[
        float, typer.Option(min=1, help="Seconds without a call after which a trajectory has ended.")
    ] = 3600,
    per_file: Annotated[int, typer.Option(min=1, help="Trajectories in a file.")] = 256,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Let --host be one that other machines can reach.")
    ] = False,
) -> None:
    """A recipe's policies as an OpenAI-compatible server: each trajectory has a URL, and is written as a trajectory.

    To train agents that call over HTTP, give them team.base_url in a workflow (docs/how_to/serving.md).
    """
    try:
        from creditflow.cli.serve import serve
    except ImportError as missing:
        raise InputError(f"serve needs {missing.name}: pip install 'creditflow[serve]'") from missing

    serve(recipe, overrides or [], out, host, port, idle, per_file, remote=allow_remote, reporter=_reporter())


@data_app.command()
def gsm8k(
    source: Annotated[Path, typer.Option("--from", metavar="FILE", help="GSM8K's JSONL as published.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The Parquet file to write.")],
) -> None:
    """GSM8K (question and answer) as tasks."""
    from creditflow.cli.data import gsm8k

    gsm8k(source, out, _reporter())


@guard_app.command("test")
def guard_test(
    recipe: Recipe,
    overrides: Overrides = None,
    *,
    scenario: Annotated[
        str,
        typer.Option(
            metavar="S",
            help="healthy, entropy_collapse, failing_rewards, contradictory, not_finite, accuracy_drop, shut_out, "
            "unstable or slow; or a run's folder; or a file of metrics, one JSON object a line.",
        ),
    ],
    seed: Annotated[int, typer.Option(min=0, help="Of a made-up series.")] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Of a made-up series; default: the recipe's.", show_default=False)
    ] = None,
) -> None:
    """Replay a series of metrics against a recipe's rules, and print what would have happened."""
    from creditflow.cli.guard import test

    test(recipe, overrides or [], scenario, seed, steps)


@sandbox_app.command("check")
def sandbox_check(
    *,
    backend: Annotated[str, typer.Option(help="The back end to attack; auto: the one that protects here.")] = "auto",
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="An option of the back end, or a limit.", show_default=False),
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Try this attack; may be given again.", show_default=False)
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the verdicts here.")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Attacks at once; default: one a core, 4 at most.", show_default=False)
    ] = None,
) -> None:
    """Try attacks on a sandbox; exit code 0 only if all are contained.

    The attacks are bounded: what a box does not contain does no lasting harm to the machine.
    """
    from creditflow.cli.sandbox import check

    if not check(backend, option or [], only or [], json, jobs, _reporter()):
        raise typer.Exit(1)


def _reporter() -> Reporter:
    from creditflow._utils.progress import Reporter

    return Reporter()


class _WithoutPandas(MetaPathFinder):
    """Import hook that blocks pandas for `why`.

    pyarrow imports an installed pandas for its first array, which would take a third of the command's time. This
    process runs nothing but `why`, which does not use pandas.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("No module named 'pandas'", name="pandas")


def main() -> None:
    """Run the `creditflow` command."""
    if sys.argv[1:2] == ["why"]:
        sys.meta_path.insert(0, _WithoutPandas())
    app(prog_name="creditflow")
