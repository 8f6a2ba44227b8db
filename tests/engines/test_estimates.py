from creditflow.engines.base import MemoryEstimate, RunEstimate

GIB = 1 << 30


def test_run_adds_steps_and_evaluations() -> None:
    run = RunEstimate(sampling_s=20.0, scoring_s=0.25, update_s=28.0, steps=16, evaluations=3, evaluation_s=60.0)
    assert run.step_s == 48.25
    assert run.run_s == 16 * 48.25 + 3 * 60
    assert run.text() == (
        "time: a step takes about 48 s (sampling 20 s, scoring 0.25 s, update 28 s); 16 steps and 3 evaluations take "
        "about 16 min"
    )
    one = RunEstimate(0.001, 0.0, 0.002, steps=1, evaluations=1, evaluation_s=90_000.0)
    assert one.text().endswith("1 step and 1 evaluation take about 25.0 h")


def test_memory_names_the_option_and_the_sizes() -> None:
    memory = MemoryEstimate("a.key", 2048, needed=8 * GIB, limit=24 * GIB, available=17 * GIB)
    assert memory.text() == "memory: a step needs about 8.0 GiB with a.key=2048; 17.0 of 24.0 GiB are available"
