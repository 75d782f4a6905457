"""A process group over several nodes: shared memory inside a node, and every byte over the link once per node."""

from guozhuang.groups.hierarchical.process_group import HierarchicalGroup

__all__ = ["HierarchicalGroup"]
