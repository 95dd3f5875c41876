"""Find recordings that two sets share: equal sources by name, and copies by audio fingerprint."""
