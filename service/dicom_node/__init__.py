"""A DICOM node: series in by C-STORE, their SEGs or RTSTRUCTs out by C-STORE. `python -m service.dicom_node`.

It is a client of the HTTP API with a key per hospital, and has neither the database nor the store: what a
hospital's key may do is all that an image from the network can cause, and the API's checks and audit trail
hold for it. It can run on another machine, in the network of the scanners.

    scp       receives: an object is acknowledged when it is on the disk
    spool     the queue on disk: receiving, ready, failed
    forward   sends a complete series to the API, and the answer to the destination; retries
"""
