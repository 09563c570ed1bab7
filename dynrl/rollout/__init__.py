"""The rollout side: the controller and its ledger, schedules, the group buffer, and the producers of groups."""
