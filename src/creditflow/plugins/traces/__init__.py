"""Trajectories from traces of other systems.

`read_spans` and the `from_*` functions read spans into one form; `convert` builds trajectories from them.
"""

from creditflow.plugins.traces.convert import Converted, ConvertOptions, LeftOut, convert
from creditflow.plugins.traces.files import from_chat_log, read_spans
from creditflow.plugins.traces.spans import Span, from_agent_lightning, from_json, from_readable

__all__ = [
    "ConvertOptions",
    "Converted",
    "LeftOut",
    "Span",
    "convert",
    "from_agent_lightning",
    "from_chat_log",
    "from_json",
    "from_readable",
    "read_spans",
]
