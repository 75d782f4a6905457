"""Bagua's Python interface, carried out by Guozhuang: functions have the names and module paths that they have in Bagua.

``import bagua.torch_api`` finds ``guozhuang.compat.bagua.torch_api``. docs/bagua.md lists what is there, and what differs.
"""
