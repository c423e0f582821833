package sshconfig_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/sshconfig"
)

const pattern = "/state dir/sessions/*/ssh_config"

func at(t *testing.T) sshconfig.File {
	t.Helper()
	dir := t.TempDir()
	return sshconfig.File{Path: filepath.Join(dir, ".ssh", "config"), Lock: filepath.Join(dir, "lock")}
}

func content(t *testing.T, f sshconfig.File) string {
	t.Helper()
	text, err := os.ReadFile(f.Path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// What the user wrote stays, byte for byte.
func TestIncludeAndExclude(t *testing.T) {
	for name, own := range map[string]string{
		"nothing":       "",
		"hosts":         "# mine\nHost *\n  SendEnv X\n",
		"match":         "Host a\n\nMatch host b\n  User c\n",
		"CRLF":          "Host a\r\n  User b\r\n",
		"bytes":         "# caf\xe9 \x00\n",
		"no last break": "Host a\n  User b",
	} {
		f := at(t)
		if err := os.MkdirAll(filepath.Dir(f.Path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(f.Path, []byte(own), 0o640); err != nil {
			t.Fatal(err)
		}
		if f.Includes(pattern) {
			t.Errorf("%s: Includes = true before Include", name)
		}
		for i, want := range []bool{true, false} {
			if changed, err := f.Include(t.Context(), pattern); err != nil || changed != want {
				t.Errorf("%s: Include %d = %v, %v, want %v", name, i, changed, err, want)
			}
		}
		text := content(t, f)
		if !f.Includes(pattern) || strings.Count(text, "\nInclude \""+pattern+"\"\n") != 2 || !strings.Contains(text, own) {
			t.Errorf("%s: after Include the file is %q", name, text)
		}
		if st, err := os.Stat(f.Path); err != nil || st.Mode().Perm() != 0o640 {
			t.Errorf("%s: mode %v, %v, want 0640", name, st.Mode(), err)
		}
		if changed, err := f.Exclude(t.Context()); err != nil || !changed {
			t.Errorf("%s: Exclude = %v, %v, want true", name, changed, err)
		}
		want := own
		if own != "" && !strings.HasSuffix(own, "\n") {
			want += "\n"
		}
		if text := content(t, f); text != want {
			t.Errorf("%s: after Exclude the file is %q, want %q", name, text, want)
		}
	}
}

// Another pattern, and text that the user has added after the end, are put in order.
func TestIncludeAgain(t *testing.T) {
	f := at(t)
	if _, err := f.Include(t.Context(), "/old/*/ssh_config"); err != nil {
		t.Fatal(err)
	}
	first := content(t, f)
	if err := os.WriteFile(f.Path, []byte(first+"Host *\n  SendEnv SECRET\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if changed, err := f.Include(t.Context(), pattern); err != nil || !changed {
		t.Errorf("Include = %v, %v, want true", changed, err)
	}
	text := content(t, f)
	if strings.Contains(text, "/old/") || !strings.HasSuffix(text, "Match all\nInclude \""+pattern+"\"\n# end agent-sessionizer\n") {
		t.Errorf("the file is %q", text)
	}
}

func TestLinkStays(t *testing.T) {
	f := at(t)
	dotfile := filepath.Join(t.TempDir(), "config")
	if err := os.WriteFile(dotfile, []byte("Host a\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Dir(f.Path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(dotfile, f.Path); err != nil {
		t.Fatal(err)
	}
	if _, err := f.Include(t.Context(), pattern); err != nil {
		t.Fatal(err)
	}
	if to, err := os.Readlink(f.Path); err != nil || to != dotfile {
		t.Errorf("Readlink = %q, %v, want %q", to, err, dotfile)
	}
	if text, err := os.ReadFile(dotfile); err != nil || !strings.Contains(string(text), "Include") {
		t.Errorf("the file behind the link is %q, %v", text, err)
	}
}

func TestDamagedFileIsNotChanged(t *testing.T) {
	f := at(t)
	if _, err := f.Include(t.Context(), pattern); err != nil {
		t.Fatal(err)
	}
	text := strings.Replace(content(t, f), "# end agent-sessionizer\n", "", 1)
	if err := os.WriteFile(f.Path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, do := range map[string]func() (bool, error){
		"Include": func() (bool, error) { return f.Include(t.Context(), pattern) },
		"Exclude": func() (bool, error) { return f.Exclude(t.Context()) },
	} {
		if _, err := do(); fail.CodeOf(err) != fail.Conflict {
			t.Errorf("%s of a damaged file: %v, want a conflict", name, err)
		}
	}
	if now := content(t, f); now != text {
		t.Errorf("the damaged file is %q, want %q", now, text)
	}
	if _, err := f.Include(t.Context(), "/state/\"dir/*/ssh_config"); fail.CodeOf(err) != fail.Host {
		t.Errorf("Include of a path with a quote: %v", err)
	}
}
