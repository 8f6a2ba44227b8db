"""Parts that the core does not need. Each plug-in registers through entry points, as another distribution would.

This module has the base classes of a plug-in's sections of options (`creditflow.config.plugins`).
"""

from creditflow._utils.sections import PluginSection, PolicySource

__all__ = ["PluginSection", "PolicySource"]
