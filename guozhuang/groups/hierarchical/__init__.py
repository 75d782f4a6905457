"""A process group whose ranks are on several nodes: memory inside a node, and every byte over the link once per node."""

from guozhuang.groups.hierarchical.process_group import HierarchicalGroup

__all__ = ["HierarchicalGroup"]
