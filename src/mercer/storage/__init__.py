"""Files that several processes and later versions read: locks, and dataclasses as JSON."""
