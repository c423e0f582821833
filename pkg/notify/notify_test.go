package notify

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
)

func TestHasDesktop(t *testing.T) {
	for _, c := range []struct {
		env  map[string]string
		want bool
	}{
		{map[string]string{"DISPLAY": ":0"}, true},
		{map[string]string{"WAYLAND_DISPLAY": "wayland-0"}, true},
		{map[string]string{"DISPLAY": ":0", "SSH_CONNECTION": "192.0.2.1 1 192.0.2.2 22"}, false},
		{map[string]string{"DISPLAY": ":0", "SSH_TTY": "/dev/pts/1"}, false},
		{nil, runtime.GOOS == "darwin"},
	} {
		if got := HasDesktop(func(name string) string { return c.env[name] }); got != c.want {
			t.Errorf("HasDesktop with %v = %t, want %t", c.env, got, c.want)
		}
	}
}

// recorder puts a program of that name into PATH. The program writes its arguments to
// file.
func recorder(t *testing.T, name string) (file string) {
	t.Helper()
	dir := t.TempDir()
	file = filepath.Join(dir, "args")
	script := "#!/bin/sh\nfor a in \"$@\"; do printf '[%s]' \"$a\"; done >'" + file + "'\n"
	if err := os.WriteFile(filepath.Join(dir, name), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	return file
}

// TestDesktop checks that a guest's text is passed as one argument and without markup.
func TestDesktop(t *testing.T) {
	name, want := "notify-send", `[--app-name=agent-sessionizer][--][api][-x &lt;b&gt;&amp; "$(id)" `+"`id`"+`]`
	body := `-x <b>& "$(id)" ` + "`id`"
	if runtime.GOOS == "darwin" {
		name, want = "osascript", "[agent-sessionizer: api]["+body+"]"
	} else {
		want = strings.Replace(want, `"$(id)"`, `&#34;$(id)&#34;`, 1)
	}
	file := recorder(t, name)
	if err := Desktop(t.Context(), "api", body); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(file)
	if err != nil || !strings.HasSuffix(string(got), want) {
		t.Errorf("arguments of %s = %s, %v, want %s at the end", name, got, err, want)
	}
}

// notification matches the only AppleScript that osascript gets: a handler that shows two of its
// arguments. Its numbers are those of body and title.
var notification = regexp.MustCompile(`^on run argv\ndisplay notification \(item ([12]) of argv\) with title \(item ([12]) of argv\)\nend run$`)

// shownByOsascript returns what osascript(1) would show: it reads options up to the first argument
// that is none, joins the lines of the script, and passes the other arguments to its handler.
func shownByOsascript(argv []string) (title, body string, err error) {
	var script []string
	rest := argv[1:]
	for len(rest) > 1 && strings.HasPrefix(rest[0], "-") {
		if rest[0] != "-e" {
			return "", "", fmt.Errorf("option %q", rest[0])
		}
		script, rest = append(script, rest[1]), rest[2:]
	}
	m := notification.FindStringSubmatch(strings.Join(script, "\n"))
	if argv[0] != "osascript" || m == nil || len(rest) != 2 {
		return "", "", fmt.Errorf("program %s, script %q, arguments %q", argv[0], script, rest)
	}
	item := func(number string) string { return rest[number[0]-'1'] }
	return item(m[2]), item(m[1]), nil
}

// TestDesktopOnMac checks that no text of a guest becomes an option or a part of the script.
func TestDesktopOnMac(t *testing.T) {
	for _, text := range []string{
		"", "api", "-e", "-l JavaScript", "--", `" & (do shell script "id") & "`, `\`, "«event sysonotf»", "a\nend run\ndo shell script \"id\"", "<b>&", "$(id)", "item 1 of argv",
	} {
		title, body, err := shownByOsascript(desktopCommand("darwin", text, text))
		if err != nil || title != "agent-sessionizer: "+text || body != text {
			t.Errorf("notification of %q = %q, %q, %v, want both texts unchanged", text, title, body, err)
		}
	}
}

// TestMacCheckHasTheScript checks that scripts/mac-check.sh compiles the script that Desktop runs.
func TestMacCheckHasTheScript(t *testing.T) {
	check, err := os.ReadFile("../../scripts/mac-check.sh")
	if err != nil {
		t.Fatal(err)
	}
	var options []string
	for _, a := range desktopCommand("darwin", "", "")[1:] {
		if a == "-e" {
			options = append(options, a)
		} else if len(options) > 0 && options[len(options)-1] == "-e" {
			options[len(options)-1] = "-e '" + a + "'"
		}
	}
	if script := strings.Join(options, " "); len(options) != 3 || !strings.Contains(string(check), script) {
		t.Errorf("scripts/mac-check.sh does not contain %q", script)
	}
}

func TestCommand(t *testing.T) {
	file := filepath.Join(t.TempDir(), "out")
	t.Setenv("OUT", file)
	err := Command(t.Context(), `printf '%s' "$AGENT_STATE/$AGENT_ON" >"$OUT"`, map[string]string{"AGENT_STATE": "blocked", "AGENT_ON": "a\x00'$(id)'"})
	if err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(file); err != nil || string(got) != "blocked/a'$(id)'" {
		t.Errorf("environment of the command = %q, %v, want \"blocked/a'$(id)'\"", got, err)
	}
	err = Command(t.Context(), "echo no such thing >&2; exit 3", nil)
	if err == nil || !strings.Contains(err.Error(), "no such thing") {
		t.Errorf("failing command = %v, want \"no such thing\"", err)
	}
}
