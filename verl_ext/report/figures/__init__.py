"""The report's figures, as Vega-Lite specifications that Altair builds and checks."""
