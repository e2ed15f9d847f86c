// The dialog that asks for the API key. The key stays in memory.

const byId = (id) => document.getElementById(id);

/** Ask for the key. isWrong: the one before was refused. Returns a promise of the key. */
export function askForKey(isWrong) {
  const dialog = byId("key-dialog");
  byId("key-error").hidden = !isWrong;
  byId("key").value = "";
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    const stay = (event) => event.preventDefault();
    dialog.addEventListener("cancel", stay);
    byId("key-form").addEventListener("submit", () => {
      dialog.removeEventListener("cancel", stay);
      resolve(byId("key").value.trim());
    }, { once: true });
  });
}
