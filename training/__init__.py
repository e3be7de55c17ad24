"""Train federated models and publish them as artefacts: methods, engines, data and reports."""
