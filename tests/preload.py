"""What the fork server imports once for all processes that are forked from it; nobody else imports this module.

The package whole, and the modules of tests whose functions run in ranks. What lives then is left out of all garbage collections
of the forked processes: collecting it took each of them up to a second and copied every page that it shares with the server.
"""

import gc
import importlib
import pkgutil

import hypothesis  # noqa: F401
import pytest
import transformers.models.bert.modeling_bert  # noqa: F401

import guozhuang
import tests.hosts
import tests.processes
import tests.threads

for package in (guozhuang, tests.processes, tests.hosts, tests.threads):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except (Exception, pytest.skip.Exception):  # the latter, which is no Exception, where a library is missing
                continue  # the rank that needs it will say why, or the test that it belongs to
gc.collect()
gc.freeze()
