"""The report of check_data: statistics, anchors, tables, figures, pictures, the page."""
