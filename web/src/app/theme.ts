/** Light, dark, or as the system has it. The choice is kept in this browser. */
import { signal } from "@preact/signals";

export type Theme = "system" | "light" | "dark";
const STORED = "locum-theme";

function stored(): Theme {
  try {
    const found = localStorage.getItem(STORED);
    return found === "light" || found === "dark" ? found : "system";
  } catch {
    return "system";
  }
}

export const theme = signal<Theme>(stored());
const systemIsDark = window.matchMedia("(prefers-color-scheme: dark)");

export function applyTheme(): void {
  const dark = theme.value === "dark" || (theme.value === "system" && systemIsDark.matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
}

export function chooseTheme(chosen: Theme): void {
  theme.value = chosen;
  try {
    localStorage.setItem(STORED, chosen);
  } catch {
    // A browser that stores nothing keeps the choice for this page alone.
  }
  applyTheme();
}

systemIsDark.addEventListener("change", applyTheme);
