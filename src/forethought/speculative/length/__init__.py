"""Draft length control: fixed, scheduled, gated by acceptance, or chosen for goodput."""
