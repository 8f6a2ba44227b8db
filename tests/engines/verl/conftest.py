from collections.abc import Iterator

import pytest

from tests.forks import fast_python
from tests.ray_start import start_ray
from tests.rewards.processes import alive, descendants, until


@pytest.fixture(scope="package")
def verl_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One Ray for all verl tests of this package: four logical GPUs, with verl's CPU environment and plug-in.

    It ends with this package's tests, not with the session, because other tests start another Ray and a process has
    only one.
    """
    ray = pytest.importorskip("ray")
    verl_cpu = pytest.importorskip("verl_cpu", reason="it is not installed: uv pip install -e tests/verl_cpu --no-deps")

    assert not ray.is_initialized(), "a Ray of other tests is still there"
    variables = {
        **verl_cpu.environment(),
        "RAY_prestart_worker_first_driver": "0",  # prestarted workers would be unused, since workers are forked
        "RAY_enable_worker_prestart": "0",
        "RAY_worker_register_timeout_seconds": "300",  # on a busy machine the first workers wait for the imports
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        others = descendants()
        start_ray(
            num_cpus=32,
            num_gpus=4,
            object_store_memory=1 << 30,
            include_dashboard=False,
            runtime_env={
                "py_executable": fast_python(),
                "env_vars": {"TENSORBOARD_DIR": str(tmp_path_factory.getbasetemp() / "tensorboard")},
            },
        )
        try:
            _take_the_cpu(patch)
            yield
        finally:
            started = descendants() - others
            ray.shutdown()
        until(lambda: not any(alive(pid) for pid in started))


@pytest.fixture(scope="module")
def queue(verl_ray) -> Iterator[None]:
    """TransferQueue with one storage unit."""
    import transfer_queue as tq
    from omegaconf import OmegaConf
    from verl.trainer import config

    section = OmegaConf.load(f"{config.__path__[0]}/transfer_queue/transfer_queue.yaml")
    section.enable, section.backend.SimpleStorage.num_data_storage_units = True, 1
    tq.init(section)
    yield
    tq.close()


def _take_the_cpu(patch: pytest.MonkeyPatch) -> None:
    """Select the CPU platform in this process, where earlier tests may have imported verl with another platform."""
    import verl.plugin.platform.platform_manager as manager
    from verl_cpu.plugin import use_cpu

    use_cpu()
    patch.setattr(manager, "_current_platform", None)
    assert manager.get_platform().device_name == "cpu"
