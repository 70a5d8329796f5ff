"""What prefill and decode workers share: endpoint, admission of calls, load reports, health, drain, metrics."""
