"""The distributed engine: a plug-in to verl through its registries and subclasses.

Imported only to use verl.
"""
