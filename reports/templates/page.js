"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  for (const part of all(".js")) part.hidden = false;

  // on a phone the answer and its picture are open, and what they rest on is folded
  const contents = document.querySelector(".toc > details");
  if (contents && matchMedia("(max-width: 63.99rem)").matches) contents.open = false;
  if (matchMedia("(max-width: 34rem)").matches) for (const part of all("details.part")) part.open = false;

  // a link into a fold opens it
  const reveal = () => {
    let name = location.hash.slice(1);
    try { name = decodeURIComponent(name); } catch { /* "%" alone: no name of ours */ }
    const target = document.getElementById(name);
    if (!target) return;
    for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
    target.scrollIntoView();
  };
  addEventListener("hashchange", reveal);
  reveal();

  const save = (name, type, text) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  };

  // the filter hides what does not match; rows without an implementation stay
  const fields = all("[data-filter]");
  for (const select of all("select[data-filter]"))
    for (const name of new Set(all(`main [data-${select.dataset.filter}]`).map((part) => part.dataset[select.dataset.filter])))
      select.add(new Option(name));
  for (const part of all(".filter")) part.hidden = part.querySelector("select").length < 3; // nothing to choose
  const filter = () => {
    const value = (name) => fields.find((f) => f.dataset.filter === name);
    const operator = value("operator").value, impl = value("impl").value, differs = value("differs").checked;
    let shown = 0;
    for (const part of all("main [data-operator]")) {
      part.hidden = (operator && part.dataset.operator !== operator) || (differs && !("differs" in part.dataset));
      shown += !part.hidden && part.tagName === "FIGURE";
    }
    for (const part of all("main [data-impl]")) part.hidden = impl && part.dataset.impl !== impl;
    for (const said of all("[data-filter-said]")) said.textContent = `${shown} figures match`;
  };
  for (const field of fields) field.addEventListener("change", filter);

  // the search hides rows of tables without its text
  for (const field of all("[data-find]"))
    field.addEventListener("input", () => {
      const text = field.value.toLowerCase();
      const rows = all("main tbody tr");
      for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(text);
      for (const said of all("[data-found]")) said.textContent = text ? `${rows.filter((row) => !row.hidden).length} rows match` : "";
      if (text) for (const fold of all("main details")) fold.open ||= !!fold.querySelector("tbody tr:not([hidden])");
    });

  // commands are copied by a button
  for (const code of all(".next code, .tells code")) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "Copy";
    button.addEventListener("click", () => navigator.clipboard?.writeText(code.textContent).then(() => { button.textContent = "Copied"; }));
    code.after(" ", button);
  }

  // a map tells its cells: on hover, and by the arrow keys
  for (const map of all(".map")) {
    const cells = all("path", map);
    const out = () => map.closest("figure, .tab").querySelector(".readout");
    let at = -1;
    const tell = (i) => {
      if (at >= 0) cells[at].classList.remove("at");
      at = i;
      if (i >= 0) cells[i].classList.add("at");
      if (out()) out().textContent = i < 0 ? "" : cells[i].querySelector("title").textContent;
    };
    cells.forEach((cell, i) => cell.addEventListener("pointerenter", () => tell(i)));
    map.addEventListener("focus", () => tell(Math.max(at, 0)));
    map.addEventListener("blur", () => tell(-1));
    map.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step || !cells.length) return;
      event.preventDefault();
      tell((at + step + cells.length) % cells.length);
    });
  }

  // the picture of answers is saved as its card, which is one drawing: styles written out
  const NS = "http://www.w3.org/2000/svg";
  const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size", "font-family", "font-weight", "vector-effect"];
  const written = (from, to) => {
    const style = getComputedStyle(from);
    for (const name of STYLES) to.style.setProperty(name, style.getPropertyValue(name));
    [...from.children].forEach((child, i) => written(child, to.children[i]));
  };
  const drawn = (card) => {
    const root = card.cloneNode(true), box = card.viewBox.baseVal;
    written(card, root);
    root.removeAttribute("hidden");
    root.style.display = "block";
    for (const [name, value] of [["xmlns", NS], ["width", box.width], ["height", box.height]]) root.setAttribute(name, value);
    const back = document.createElementNS(NS, "rect");
    for (const name of ["x", "y", "width", "height"]) back.setAttribute(name, box[name]);
    back.setAttribute("fill", getComputedStyle(card.parentElement).backgroundColor);
    root.prepend(back);
    return new XMLSerializer().serializeToString(root);
  };
  for (const card of all("svg.post")) {
    const figure = card.closest("figure");
    const saves = {
      PNG: async () => {
        const image = new Image(), canvas = document.createElement("canvas");
        image.src = URL.createObjectURL(new Blob([drawn(card)], { type: "image/svg+xml" }));
        await image.decode();
        [canvas.width, canvas.height] = [2 * image.width, 2 * image.height];
        canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
        canvas.toBlob((png) => save("nondet.png", "image/png", png), "image/png");
        URL.revokeObjectURL(image.src);
      },
      SVG: () => save(`${figure.id}.svg`, "image/svg+xml", drawn(card)),
    };
    for (const [form, saved] of Object.entries(saves)) {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "save";
      button.textContent = `Save as ${form}`;
      button.setAttribute("aria-label", `Save as ${form}: ${figure.id}`);
      button.addEventListener("click", saved);
      figure.append(button, " ");
    }
  }
})();
