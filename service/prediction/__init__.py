"""From a decoded scan to an answer: options, output formats, receipt, overlay."""
