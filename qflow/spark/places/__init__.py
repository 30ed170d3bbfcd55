"""Where a query reads and writes: a spool on this host, or a broker elsewhere; one of them, or several."""
