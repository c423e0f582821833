package notify

import (
	"os"
	"path/filepath"
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
