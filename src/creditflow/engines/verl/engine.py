"""The entry of the distributed engine in the registry. Loads no module of verl before it is used."""

from __future__ import annotations

from collections.abc import Sequence

from creditflow._utils.progress import Reporter
from creditflow.config import Recipe
from creditflow.engines.base import Engine
from creditflow.engines.verl import launch
from creditflow.engines.verl.recipe import NAME
from creditflow.monitoring.trackers.base import MakeReport
from creditflow.runs import RunFolder


class VerlEngine(Engine):
    """A run on a Ray cluster; see `launch.launch`. The arguments after `--` are verl's, in Hydra's language."""

    name = NAME
    has_options = True

    def train(
        self, recipe: Recipe, options: Sequence[str], reporter: Reporter, make_report: MakeReport | None = None
    ) -> RunFolder:
        return launch.launch(recipe, options, reporter, make_report)

    def expect_trainable(self, recipe: Recipe, reporter: Reporter) -> None:
        launch.expect_trainable(recipe, reporter)

    def configuration(self, recipe: Recipe, options: Sequence[str], reporter: Reporter) -> str:
        return launch.dry_run(recipe, options, reporter)


ENGINE = VerlEngine()
