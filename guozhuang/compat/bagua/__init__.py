"""Bagua's Python interface, carried out by Guozhuang: functions have the names and module paths that they have in Bagua.

So far it holds the collectives and communicators of ``bagua.torch_api`` and the samplers of ``bagua.torch_api.contrib``;
``import bagua`` does not find it.
"""
