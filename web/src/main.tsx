/** Starts the page: styles, session, and the frame around the views. */
import { render } from "preact";
import "./styles/tokens.css";
import "./styles/base.css";
import { Frame } from "./app/frame";
import { resume } from "./app/session";
import { applyTheme } from "./app/theme";

applyTheme();
void resume();
const page = document.getElementById("page")!;
page.replaceChildren();
render(<Frame />, page);
