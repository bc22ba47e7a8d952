// Filters of the table. They are kept in the address (?target=…&op=…), so that a link shows what its writer saw.
"use strict";
{
  const form = document.getElementById("filters");
  const shown = document.getElementById("shown");
  const names = [...form.elements].map((field) => field.name).filter(Boolean);
  const cells = [...document.querySelectorAll("td.cell")];
  const made = cells.filter((cell) => cell.dataset.status !== "none").length;

  const fits = (cell, name, value) =>
    !value || (name === "quirk" ? cell.dataset.quirk.split(" ").includes(value) : cell.dataset[name] === value);

  function apply() {
    const wanted = names.map((name) => [name, form.elements[name].value]);
    const asked = wanted.filter(([, value]) => value);
    let count = 0;
    for (const cell of cells) {
      const fit = asked.every(([name, value]) => fits(cell, name, value));
      cell.classList.toggle("off", !fit);
      if (fit && cell.dataset.status !== "none") count += 1;
    }
    for (const table of document.querySelectorAll("table[role=table]")) narrow(table, asked.length > 0);
    const said = asked.map(([name, value]) => `${name} ${value}`).join(", ");
    shown.textContent = asked.length ? `${count} of ${made} cells: ${said}` : `${made} cells`;
    return asked;
  }

  // Rows and columns in which nothing is left are hidden; so is a table, and the heading of an op.
  function narrow(table, some) {
    const rows = [...table.querySelectorAll("tr.problem")];
    const heads = [...table.querySelectorAll("thead tr:last-child th")];
    const groups = [...table.querySelectorAll("thead th.group")];
    const inUse = heads.map(() => !some);
    for (const row of rows) {
      const own = [...row.querySelectorAll("td.cell")];
      own.forEach((cell, index) => { inUse[index] ||= !cell.classList.contains("off"); });
      row.hidden = some && own.every((cell) => cell.classList.contains("off"));
    }
    heads.forEach((head, index) => { head.hidden = !inUse[index]; });
    for (const row of rows) {
      const breaks = [];
      [...row.querySelectorAll("td.cell")].forEach((cell, index) => {
        cell.hidden = !inUse[index];
        const before = cell.previousElementSibling;
        if (before.classList.contains("break")) breaks.push([before, false]);
        if (!cell.classList.contains("off")) breaks[breaks.length - 1][1] = true;
      });
      for (const [place, used] of breaks) place.hidden = !used;
    }
    let at = 0;
    for (const group of groups) {
      const own = inUse.slice(at, (at += Number(group.dataset.span)));
      const left = own.filter(Boolean).length;
      group.hidden = left === 0;
      if (left) group.colSpan = left;
    }
    for (const op of table.querySelectorAll("tr.op")) {
      let row = op.nextElementSibling, used = false;
      for (; row && row.classList.contains("problem"); row = row.nextElementSibling) used ||= !row.hidden;
      op.hidden = !used;
      op.firstElementChild.colSpan = 1 + inUse.filter(Boolean).length;
    }
    table.closest(".scroll").hidden = !inUse.some(Boolean);
  }

  function read() {
    const query = new URLSearchParams(location.search);
    for (const name of names) {
      const field = form.elements[name], value = query.get(name) || "";
      // A link may name what this run has not: it shows no cell, and says for what.
      if (![...field.options].some((option) => option.value === value)) field.add(new Option(value, value));
      field.value = value;
    }
    apply();
  }

  function changed() {
    const query = new URLSearchParams(apply());
    const search = query.size ? `?${query}` : location.pathname;
    history.pushState(null, "", search);
  }

  form.hidden = false;
  form.addEventListener("change", changed);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", (event) => {
    event.preventDefault();
    for (const name of names) form.elements[name].value = "";
    changed();
  });
  addEventListener("popstate", read);
  read();
}
