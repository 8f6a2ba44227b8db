from creditflow.rewards.execution.calls import Returned
from creditflow.rewards.execution.scheduler import Job


def test_first_answer_of_a_call_counts():
    counted = []
    job = Job([None, None], lambda: counted.append(1))
    job.answer(0, Returned(0.5))
    job.fail_open_calls("its Ray actor cannot start")
    job.answer(1, Returned(1.0))
    assert [job.returned[i].error for i in (0, 1)] == ["", "its Ray actor cannot start"]
    assert len(counted) == 2
