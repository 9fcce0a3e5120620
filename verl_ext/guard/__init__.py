"""The guard: rules, state and forecast. A pure state machine, without torch."""
