"""How fast batches pass TransferQueue, and what a controller's work takes: every constant of the plugin's cost, once.

Measured on two CPU cores, where clients and units share them: low figures for the machines that train. docs/plan.md has
the tables that they are from, and what else was seen.
"""

# python tools/bench_transfer.py, GB/s of expert ids: one client with one unit; one unit with the most clients.
CLIENT_PUT, CLIENT_GET = 1.1, 0.82
UNIT_PUT, UNIT_GET = 1.2, 0.90
# The same command's short rows, two units: microseconds of a client for each row of each field, however short.
VALUE_PUT_US, VALUE_GET_US = 43.0, 19.0
# An assumption: 100 Gbit/s of Ethernet a node, over which TransferQueue's sockets go.
NODE_GB_S = 12.5

CORRECTION_NS = 17.0  # of the controller, a response token: python tools/bench_correction.py
GUARD_MS = 0.5  # of the controller, a step: python tools/bench_guard.py

UNITS_A_NODE = 2  # TransferQueue's own advice: "Recommended: >= 2 x number of nodes" (its config.yaml, 0.1.11)
READ_SHARE = 0.005  # of a step: what the training ranks may wait for the storage units
