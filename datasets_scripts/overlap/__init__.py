"""Find recordings that two sets share: clips with the same source id, and copies found by audio fingerprint."""
