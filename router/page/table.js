// Rows of numbers in a table whose head and body are in the page.

/** Fill a table: `columns` are {title, of: row -> text, node or {text, over}, isNumber, wraps}. */
export function fill(head, body, columns, rows) {
  if (!head.rows.length) {
    const row = head.insertRow();
    for (const { title, isNumber } of columns) {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.textContent = title;
      if (isNumber) cell.className = "n";
      row.append(cell);
    }
  }
  body.replaceChildren(...rows.map((values) => filledRow(columns, values)));
}

function filledRow(columns, values) {
  const row = document.createElement("tr");
  for (const { of, isNumber, wraps } of columns) {
    const cell = row.insertCell();
    const value = of(values);
    const { text, over } = value instanceof Node || value === null || typeof value !== "object" ? { text: value } : value;
    cell.append(text ?? "–");
    cell.classList.toggle("n", Boolean(isNumber));
    cell.classList.toggle("wrap", Boolean(wraps));
    cell.classList.toggle("over", Boolean(over));
  }
  return row;
}
