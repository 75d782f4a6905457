"""``guozhuang tune``: races settings of a workload, knob by knob, and writes the plan of the fastest."""
