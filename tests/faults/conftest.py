from tests.engines.conftest import word_model_folder  # noqa: F401  # a fixture
