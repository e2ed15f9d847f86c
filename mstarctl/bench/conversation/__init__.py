"""Load of spoken conversations: plan, one client, outcomes and figures."""
