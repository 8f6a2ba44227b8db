"""The policies of a recipe, and the agents that act through them."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from creditflow.config import (
    EndpointConfig,
    load_recipe,
    model_of,
    policies_in_use,
    recipe_of_dict,
    trained_agents,
    trained_policies,
)
from creditflow.engines.common.components import build_components
from creditflow.engines.local.policy_set import load_policies
from creditflow.errors import ConfigError
from tests.rollout.test_frozen import RECIPE, TRAJECTORY


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "toy.py").write_text(TRAJECTORY)
    (tmp_path / "toy.yaml").write_text(RECIPE)
    return tmp_path / "toy.yaml"


def with_policies(file: Path, **sections: object) -> Path:
    """Return the recipe with other `policies` and `agents`."""
    recipe = OmegaConf.load(file)
    recipe.pop("policies", None)
    recipe["team"]["agents"] = sections.pop("agents")
    OmegaConf.save(OmegaConf.merge(recipe, sections), file)
    return file


SERVED = {"endpoint": {"base_url": "http://127.0.0.1:9/v1", "model": "m"}}


def test_policy_has_the_runs_model_or_a_separate_one(file: Path) -> None:
    config = load_recipe(with_policies(file, agents={"a": {}})).config
    assert (policies_in_use(config), trained_policies(config)) == ({"default": ("a",)}, ("default",))
    agents = {"a": {"policy": "one"}, "b": {"policy": "two"}, "c": {"policy": "one"}, "d": {"policy": "far"}}
    policies = {"one": None, "two": {"model": {"path": "other"}}, "far": SERVED}
    config = load_recipe(with_policies(file, agents=agents, policies=policies)).config
    assert policies_in_use(config) == {"one": ("a", "c"), "two": ("b",), "far": ("d",)}
    assert trained_policies(config) == ("one", "two")
    assert trained_agents(config) == ["a", "c", "b"]
    assert model_of(config, "one") == ("tiny", "actor_rollout_ref.model.path")
    assert model_of(config, "two") == ("other", "policies.two.model.path")


def test_endpoint_address_alone_merges_with_overrides(file: Path) -> None:
    policies = {"default": {}, "far": {"endpoint": "http://127.0.0.1:9/v1", "model": {"path": "org/m"}}}
    file = with_policies(file, agents={"a": {}, "b": {"policy": "far"}}, policies=policies)
    config = load_recipe(file, ["policies.far.endpoint.timeout=5"]).config
    assert config.policies["far"].endpoint is not None
    assert config.policies["far"].endpoint.base_url == "http://127.0.0.1:9/v1"
    assert config.policies["far"].endpoint.timeout == 5
    OmegaConf.save(OmegaConf.merge(OmegaConf.load(file), {"policies": {"far": {"endpoint": SERVED["endpoint"]}}}), file)
    config = load_recipe(file, ["policies.far.endpoint=http://127.0.0.2:9/v1", "policies.far.model.path=m"]).config
    assert config.policies["far"].endpoint == EndpointConfig(base_url="http://127.0.0.2:9/v1", model="m")
    given = ["policies.far.endpoint=http://127.0.0.2:9/v1", "policies.far.endpoint.timeout=7"]
    for overrides in (given, given[::-1]):
        endpoint = load_recipe(file, [*overrides, "policies.far.model.path=m"]).config.policies["far"].endpoint
        assert endpoint == EndpointConfig(base_url="http://127.0.0.2:9/v1", model="m", timeout=7)
    assert load_recipe(file, ["policies.far.endpoint=null"]).config.policies["far"].trained


def test_recipe_with_policies_survives_serialization(file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(file, ["policies.big.endpoint.extra_body={top_p: 0.5}"])
    assert recipe_of_dict(json.loads(json.dumps(recipe.to_dict())), recipe.name, recipe.folder) == recipe
    (tmp_path / "again.yaml").write_text(recipe.to_yaml())
    assert load_recipe(tmp_path / "again.yaml").config.policies == recipe.config.policies


BOTH = {"a": {}, "b": {"policy": "far"}}


INVALID = [
    ({**SERVED, "trainable": True}, r"policies.far.trainable: a model behind an endp"),
    ({"endpoint": {"base_url": "http://h/v1"}}, r"far.endpoint.model: expected the m"),
    ({**SERVED, "model": {"path": "n"}}, r"endpoint.model: .* got 'm' and 'n'"),
    ({"endpoint": {"url": "http://h"}}, r"unknown key 'policies.far.endpoint.url'"),
    ({"endpiont": {}}, r"'policies.far.endpiont' \(did you mean 'policies.far.endpoint'"),
    ({"endpoint": 7}, r"policies.far.endpoint: expected a mapping of options, got 7"),
    ({"model": {"path": 3}}, r"policies.far.model.path: expected a Hugging Face folder, .* got 3"),
]


@pytest.mark.parametrize(
    ("agents", "policies", "message"),
    [
        *((BOTH, {"default": {}, "far": policy}, message) for policy, message in INVALID),
        ({"a": {"policy": "defualt"}}, {}, r"team.agents.a.policy: 'defualt' is no policy .*did you mean 'default'"),
        ({"a": {}}, {"solver": {}}, r"team.agents.a.policy: 'default' is no policy of the recipe; there is solver"),
        (BOTH, {"default": {}, "far": {}, "fat": {}}, r"policies.fat: no agent acts .* \(did you mean 'far'\?\)"),
        ({"a": {"policy": "far"}}, {"far": SERVED}, r"policies: expected one at least that is trained; far is frozen"),
        ({"a": {}}, {"default": {"trainable": False}}, r"policies: expected one at least that is trained"),
    ],
)
def test_invalid_policies_are_refused_by_name(
    file: Path, agents: dict[str, object], policies: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_recipe(with_policies(file, agents=agents, policies=policies))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("base_url=127.0.0.1:8000", r"policies.big.endpoint.base_url: expected an address such as"),
        ("base_url=http://me:pw@host/v1", r"base_url: expected an address without user"),
        ("base_url='http://[::1/v1'", r"base_url: expected an address such as"),
        ("api_key_env=sk-abcdefghijklmnopqrstuvwxyz", r"api_key_env: expected the name of an environment variable"),
        ("timeout=0", r"policies.big.endpoint.timeout: expected a number above 0"),
        ("give_up_after=.inf", r"policies.big.endpoint.give_up_after: expected a number above 0"),
        ("max_retries=-1", r"policies.big.endpoint.max_retries: expected a number of at least 0"),
        ("headers={Authorization: Bearer x}", r"headers.Authorization: is not to be set here; a key goes into"),
        ("headers={api-key: x}", r"headers.api-key: is not to be set here"),
        ("headers={X-Mine: é}", r"headers: 'X-Mine' cannot be sent"),
        ("headers={X-Mine: sk-abcdefghijklmnopqrstuvwxyz}", r"headers.X-Mine: this looks like a key"),
        ("extra_body={messages: []}", r"extra_body.messages: is not to be changed here"),
        ("extra_body={top_p: .nan}", r"extra_body.top_p: cannot be sent as JSON"),
        ("extra_body={user: sk-abcdefghijklmnopqrstuvwxyz}", r"extra_body.user: this looks like a key"),
    ],
)
def test_invalid_endpoint_option_is_refused_by_name(file: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_recipe(file, [f"policies.big.endpoint.{override}"])
    assert "abcdefghij" not in str(caught.value)


def test_missing_key_is_refused_by_build_parts(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    recipe = load_recipe(file)  # a kept run can be read without its key
    with pytest.raises(ConfigError, match=r"policies.big.endpoint: api_key_env: .* MY_KEY is not set"):
        build_components(recipe)


def test_local_policies_load_separate_weights(file: Path) -> None:
    agents = {"a": {"policy": "one"}, "b": {"policy": "two"}, "c": {"policy": "still"}, "d": {"policy": "far"}}
    policies = {"one": {}, "two": {}, "still": {"trainable": False}, "far": SERVED}
    loaded = load_policies(load_recipe(with_policies(file, agents=agents, policies=policies)))
    assert list(loaded) == ["one", "two", "still"]
    assert len({id(policy.model) for policy in loaded.values()}) == 3


def test_adapter_policies_share_a_base_with_frozen_ones(file: Path) -> None:
    agents = {"a": {"policy": "one"}, "b": {"policy": "two"}, "c": {"policy": "still"}, "d": {"policy": "full"}}
    policies = {"one": {}, "two": {"lora_rank": 2}, "still": {"trainable": False}, "full": {"lora_rank": 0}}
    file = with_policies(file, agents=agents, policies=policies)
    loaded = load_policies(load_recipe(file, ["actor_rollout_ref.model.lora_rank=4"]))
    assert loaded["one"].model is loaded["two"].model is loaded["still"].model
    assert loaded["full"].model is not loaded["one"].model
    ranks = {name: {min(w.shape) for w in loaded[name].parameters} for name in ("one", "two")}
    assert ranks == {"one": {4}, "two": {2}}
