"""What two sets share: the same source recordings by name, and copies by audio fingerprint."""
