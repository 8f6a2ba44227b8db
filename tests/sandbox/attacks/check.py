"""Try attacks on a sandbox and return a verdict for each. Works with any object that implements `Sandbox`."""

from __future__ import annotations

import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

from creditflow.errors import first_line
from creditflow.sandbox.base import Sandbox, SandboxError, SandboxUnavailable
from tests.sandbox.attacks.attack import (
    ATTACKS,
    ENVIRONMENT_CANARY,
    Attack,
    AttackFinding,
    CannotTry,
    Outcome,
    Scene,
    kill_all,
    run_program,
    still_alive,
)

CONTROL = "control"
"""A program without an attack. It must succeed: a broken box must not pass the check."""

PATIENCE_S = 20.0
"""Time allowed to a back end on top of the time limit of its runs, in seconds."""

Fate = Literal["contained", "NOT CONTAINED", "could not be tried"]
_LENGTH = 240


@dataclass(frozen=True, slots=True)
class AttackVerdict:
    """The verdict on one attack."""

    attack: str
    fate: Fate
    seen: str
    """One line: the observed events, or the reason why it could not be tried."""
    seconds: float = 0.0

    @property
    def contained(self) -> bool:
        """Whether the box passed. An attack that could not be tried is not contained."""
        return self.fate == "contained"


class _Undocumented(Exception):
    """The back end raised an exception outside the contract of `Sandbox`."""


class _Control(Attack):
    """Print, read the input, leave a file, and exit with code 7."""

    name = CONTROL
    keep = ("left", "missing")
    program = """
report(stdin=sys.stdin.read())
with open("left", "w") as file:
    file.write("".join(reversed(TOKEN)))
report(done=True)
sys.stdout.flush()
os._exit(7)
"""

    def act(self, scene: Scene, box: Sandbox) -> Outcome:
        outcome = Outcome()
        run_program(scene, box, outcome, self.program, self.keep, stdin=scene.secret.encode())
        return outcome

    def judge(self, scene: Scene, outcome: Outcome) -> AttackFinding:
        result = outcome.results[-1]
        faults = {
            f"its exit code was {result.exit_code} instead of 7": result.exit_code != 7,
            f"limit {result.limit} ended it": result.limit is not None,
            "its input did not reach it": outcome.reports.get("stdin") != scene.secret,
            "the file that it left did not come back": outcome.kept["left"] != scene.token[::-1].encode(),
            f"a file that it did not leave: {outcome.kept['missing']!r} instead of FileNotFoundError": (
                outcome.kept["missing"] != "FileNotFoundError"
            ),
        }
        wrong = [fault for fault, found in faults.items() if found]
        return AttackFinding(not wrong, "; ".join(wrong) or "a harmless program ran as it should")


def check_sandbox(
    sandbox: Sandbox,
    only: Sequence[str] = (),
    *,
    jobs: int | None = None,
) -> list[AttackVerdict]:
    """Try every attack (or those named in `only`) on a sandbox, after a control; one verdict each, in registry order.

    All contained: `all(verdict.contained for verdict in check_sandbox(box))`. An attack passes only if its program
    demonstrably ran. If the control fails, no attack is tried. The sandbox may offer `memory_bound() -> (bytes, how)`:
    the memory bound of all processes together, and its mechanism in words.

    Cost: some seconds at `CHECK_LIMITS`, and without containment at most 700 MB of memory and 200 MB of disk. `jobs`:
    number of attacks at a time (default: one per core, at most 4); attacks that would disturb each other run one by
    one. During the check `CREDITFLOW_CANARY` is set in os.environ, and canary files exist in the temporary folders, the
    home and the current folder. Raises SandboxUnavailable if the back end does not work here.
    """
    chosen = [attack for name, attack in ATTACKS.items() if not only or name in only]
    with _environment_canary() as secret:
        control = _verdict(_Control(), sandbox, secret)
        verdicts = {CONTROL: control}
        if not control.contained:
            for attack in chosen:
                verdicts[attack.name] = AttackVerdict(attack.name, "could not be tried", "the control did not succeed")
            return [verdicts[CONTROL], *(verdicts[attack.name] for attack in chosen)]
        together = [attack for attack in chosen if not attack.alone]
        with ThreadPoolExecutor(jobs or min(4, os.cpu_count() or 1)) as pool:
            pending = [pool.submit(_verdict, attack, sandbox, secret) for attack in together]
            try:
                for future in as_completed(pending):
                    verdicts[future.result().attack] = future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        for attack in chosen:
            if attack.alone:
                verdicts[attack.name] = _verdict(attack, sandbox, secret)
    return [verdicts[CONTROL], *(verdicts[attack.name] for attack in chosen)]


def memory_bound(sandbox: Sandbox) -> tuple[int, str] | None:
    """The memory bound of all processes of a run, in bytes, and its mechanism; None if the back end states none."""
    said = getattr(sandbox, "memory_bound", None)
    if said is None:
        return None
    amount, how = said()
    return int(amount), str(how)


@contextmanager
def _environment_canary() -> Iterator[str]:
    """Put a secret into this process's environment, before a thread of the check copies the environment."""
    before, secret = os.environ.get(ENVIRONMENT_CANARY), "sc" + secrets.token_hex(16)
    os.environ[ENVIRONMENT_CANARY] = secret
    try:
        yield secret
    finally:
        del os.environ[ENVIRONMENT_CANARY]
        if before is not None:
            os.environ[ENVIRONMENT_CANARY] = before


def _verdict(attack: Attack, sandbox: Sandbox, secret: str) -> AttackVerdict:
    started = time.monotonic()
    with ExitStack() as stack:
        scene = Scene(sandbox.limits, memory_bound(sandbox), secret, stack)
        try:
            finding = _find(attack, sandbox, scene)
            fate: Fate = "contained" if finding.contained else "NOT CONTAINED"
            seen = finding.seen
        except CannotTry as error:
            fate, seen = "could not be tried", first_line(error)
        except _Undocumented as error:
            fate, seen = "NOT CONTAINED", first_line(error)
        left = still_alive(scene.token)
        if left:
            kill_all(left)
            fate, seen = "NOT CONTAINED", f"processes alive on the host after the run: {len(left)}; {seen}"
    return AttackVerdict(attack.name, fate, _printable(seen), time.monotonic() - started)


def _find(attack: Attack, sandbox: Sandbox, scene: Scene) -> AttackFinding:
    attack.prepare(scene)
    started = time.monotonic()
    # A hanging box must not hang the check: the thread is abandoned. An attack takes at most three runs.
    patience = 3 * sandbox.limits.wall_s + PATIENCE_S
    with scene.watching():
        outcome = _patiently(lambda: attack.act(scene, sandbox), patience)
    if outcome is None:
        return AttackFinding(False, f"the back end did not return within {patience:.0f} s")
    outcome.seconds = time.monotonic() - started
    _expect_ran(attack, scene, outcome)
    return attack.judge(scene, outcome)


def _patiently(act: Callable[[], Outcome], seconds: float) -> Outcome | None:
    """Return the result of `act`; None after a timeout. Raises CannotTry if the back end reports its own failure.

    Raises _Undocumented for an exception outside the contract: the program caused an error in the back end.
    """
    answers: queue.Queue[Outcome | Exception] = queue.Queue()

    def work() -> None:
        try:
            answers.put(act())
        except Exception as error:
            answers.put(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        answer = answers.get(timeout=seconds)
    except queue.Empty:
        return None
    if isinstance(answer, SandboxUnavailable | CannotTry):
        raise answer
    if isinstance(answer, SandboxError):
        raise CannotTry(f"the back end failed: {first_line(answer)}") from answer
    if isinstance(answer, Exception):
        raise _Undocumented(f"the back end raised {type(answer).__name__}: {first_line(answer)}") from answer
    return answer


def _expect_ran(attack: Attack, scene: Scene, outcome: Outcome) -> None:
    """Raise CannotTry unless every program printed the token and then ended by itself or was ended by the box.

    A program that the wall clock ended has not tried everything, unless the attack is to run that long.
    """
    for result in outcome.results:
        if not result.stdout.lstrip().startswith(scene.token.encode()):
            end = f"exit code {result.exit_code}, limit {result.limit}, signal {result.signal}"
            lines = result.stderr.decode(errors="replace").strip().splitlines()
            raise CannotTry(f"the program did not start ({end}{': ' + lines[-1] if lines else ''})")
    last = outcome.results[-1]
    cut = last.limit is not None or last.signal is not None or outcome.stopped
    if not (outcome.reports.get("done") or cut or last.exit_code == 0):
        lines = last.stderr.decode(errors="replace").strip().splitlines()
        raise CannotTry(f"the program failed by itself: {lines[-1] if lines else f'exit code {last.exit_code}'}")
    if last.limit == "wall" and not (outcome.reports.get("done") or attack.ends_by_clock):
        raise CannotTry("the clock ended it before it had tried everything; try with a larger wall_s")


def _printable(text: str) -> str:
    """One line of bounded length without control characters: the program controls part of the text."""
    line = "".join(letter if letter.isprintable() else " " for letter in text)
    return line if len(line) <= _LENGTH else line[: _LENGTH - 3] + "..."
