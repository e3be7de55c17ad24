"""Identity of callers: API keys and OIDC bearer tokens."""
