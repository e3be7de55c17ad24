"""FedIns against single SSF, full tuning and controls."""
