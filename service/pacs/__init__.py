"""PACS by DICOMweb: the configured servers, a client of one, and the requests that become jobs."""
