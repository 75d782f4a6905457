"""``--audit``: under data parallelism some steps are computed once more by one process, and gradients are compared.

See [Note: the audit of a step] in audit.py.
"""

from .audit import audit_pair

__all__ = ["audit_pair"]
