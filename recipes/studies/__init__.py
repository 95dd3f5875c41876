"""Studies: reproduce the tables of the papers, and compare training methods (see docs/protocol.md)."""
