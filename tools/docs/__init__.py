"""Generated parts of the documentation: tables and diagrams made from the code."""
