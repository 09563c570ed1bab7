"""Kinds of tasks that the policy proposes itself: what it is shown, and how what it writes becomes a checked task."""
