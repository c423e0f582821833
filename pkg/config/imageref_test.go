package config_test

import (
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

func TestParseImageRef(t *testing.T) {
	t.Setenv("HOME", "/home/me")
	hex := strings.Repeat("0a", 32)
	for text, want := range map[string]string{
		"ubuntu":                         "ubuntu",
		"debian.golden":                  "debian.golden",
		"./x.qcow2":                      "/here/x.qcow2",
		"../x.qcow2#sha256:" + hex:       "/x.qcow2#sha256:" + hex,
		"/a/b c#1.img":                   "/a/b c#1.img",
		"~/x.img":                        "/home/me/x.img",
		"http://127.0.0.1:1/x?a=b":       "",
		"https://example.org/x.qcow2":    "",
		"https://example.org/x#sha256:1": "",
		"https://example.org/x.qcow2#sha256:" + strings.ToUpper(hex): "https://example.org/x.qcow2#sha256:" + hex,
		"http://127.0.0.1:1/x?a=b#sha256:" + hex:                     "http://127.0.0.1:1/x?a=b#sha256:" + hex,
		"https://me:secret@example.org/x#sha256:" + hex:              "",
		"https://me:secret@example.org/x#sha256:0":                   "",
		"https://me:secret@example.org/x":                            "",
		"ftp://example.org/x#sha256:" + hex:                          "",
		"file:///x#sha256:" + hex:                                    "",
		"https:///x#sha256:" + hex:                                   "",
		"./x#sha256:zz":                                              "",
		"x.qcow2 ":                                                   "",
		"--help":                                                     "",
		"":                                                           "",
		"./a\x1b[2J":                                                 "",
		"/" + strings.Repeat("a", 2000):                              "",
	} {
		r, err := config.ParseImageRef(text, "/here")
		if got := r.String(); want != "" && (err != nil || got != want) {
			t.Errorf("ParseImageRef(%q) = %q, %v, want %q", text, got, err, want)
		}
		if want == "" && fail.CodeOf(err) != fail.Usage {
			t.Errorf("ParseImageRef(%q) = %q, %v, want a usage error", text, r, err)
		}
		if err != nil && (strings.Contains(err.Error(), "secret") || strings.Contains(err.Error(), "\x1b")) {
			t.Errorf("ParseImageRef(%q): error %q, want it without secrets and control characters", text, err)
		}
		if again, err := config.ParseImageRef(want, ""); want != "" && (err != nil || again != r) {
			t.Errorf("ParseImageRef(%q) of a formatted reference = %+v, %v, want %+v", want, again, err, r)
		}
	}
	if _, err := config.ParseImageRef("./x.qcow2", ""); fail.CodeOf(err) != fail.Usage {
		t.Errorf("ParseImageRef of a relative path in the settings: error %v, want a usage error", err)
	}
	if _, err := config.ParseImageRef("https://example.org/x.qcow2", ""); !strings.Contains(fail.HintOf(err), "sha256sum") {
		t.Errorf("hint for a URL without a digest = %q, want %q in it", fail.HintOf(err), "sha256sum")
	}
}
