package config_test

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
)

// listedValue formats the values in effect, one "KEY=VALUE  LAYER ORIGIN" per line.
func listedValue(t *testing.T, f *files, repo config.RepoKey, profile string) string {
	t.Helper()
	values, err := f.load().Values(repo, profile)
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	for _, v := range values {
		from := strings.NewReplacer(f.paths.Config, "~", f.paths.System, "/etc").Replace(v.Origin.String())
		fmt.Fprintf(&b, "%s=%v  %s %s\n", v.Key, v.Value, v.Origin.Layer, from)
	}
	return b.String()
}

func TestOrigins(t *testing.T) {
	f := newFiles(t)
	f.system("config.yaml", `# of the machine
image: sys
network:
  ports: [443]
  allow:
    - a.example.org
profiles:
  big: {network: {deny: [lost.example.org]}}
`)
	f.system("resources.yaml", "defaults:\n  cpus: 2\n  memory: 2GiB\n")
	f.user("config.yaml", `pool: 0
network:
  allow:
    - b.example.org
    - 'c.example.org:22'
  host_services: ["localhost:5432"]
  enforce: false
image: ""
secrets:
  TOKEN: env:HOME
  OTHER: env:PATH
profiles:
  big:
    resources:
      memory: 16GiB
    network: &strict
      deny: [d.example.org]
repos:
  O/R:
    profile: big
    network:
      <<: *strict
      mode: isolated
    secrets:
      TOKEN: file:/x
`)
	f.user("resources.yaml", "overrides:\n  o/r: {cpus: 7, memory: 1GiB}\n")
	f.user("network-groups/git.txt", "x.example.org\n")
	t.Setenv("AGENT_SESSIONIZER_LIMITS_RUNNING", "3")
	got := listedValue(t, f, "github.com/o/r", "")
	for _, want := range []string{
		"image=sys  system /etc/config.yaml:2",
		"pool=0  user ~/config.yaml:1",
		"profile=big  user ~/config.yaml:20",
		"lima_home=" + f.paths.LimaHome + "  default default",
		"limits.running=3  environment AGENT_SESSIONIZER_LIMITS_RUNNING",
		"limits.memory_reserve=1GiB  default (shipped) config/config.yaml:2",
		"resources.cpus=7  user ~/resources.yaml:2",
		"resources.memory=16GiB  user ~/config.yaml:15",
		"resources.disk=50GiB  default (shipped) config/resources.yaml:1",
		"network.mode=isolated  user ~/config.yaml:23",
		"network.ports=[443]  system /etc/config.yaml:4",
		"network.enforce=false  user ~/config.yaml:7",
		"network.allow=a.example.org  system /etc/config.yaml:6",
		"network.allow=b.example.org  user ~/config.yaml:4",
		"network.allow=c.example.org:22  user ~/config.yaml:5",
		"network.deny=d.example.org  user ~/config.yaml:17", // from the profile
		"network.host_services=127.0.0.1:5432  user ~/config.yaml:6",
		"secrets.OTHER=env:PATH  user ~/config.yaml:11",
		"secrets.TOKEN=file:/x  user ~/config.yaml:25",
		"network-allowlist.txt=2 names  default (shipped) config/network-allowlist.txt",
		"network-groups/git.txt=1 name  user ~/network-groups/git.txt",
	} {
		if !strings.Contains(got, want+"\n") {
			t.Errorf("no %q", want)
		}
	}
	if strings.Contains(got, "lost") {
		t.Error("of a profile that the user's replaces, something is left")
	}
	if t.Failed() {
		t.Log("\n" + got)
	}
	if got := listedValue(t, f, "github.com/o/other", "big"); !strings.Contains(got, "profile=big  flag --profile\n") || !strings.Contains(got, "resources.cpus=2  system /etc/resources.yaml:2\n") {
		t.Error(got)
	}
	if _, err := f.load().Values("", "none"); fail.CodeOf(err) != fail.Usage {
		t.Error(err)
	}
}

// TestOriginsOfListsThatAddUp checks that the values agree with For, item by item.
func TestOriginsOfListsThatAddUp(t *testing.T) {
	f := newFiles(t)
	f.system("config.yaml", "network: {allow: [a.org, '@git'], host_services: ['10.0.0.1:1']}\n")
	f.user("config.yaml", `network:
  allow: []
  host_services:
  - localhost:2
profiles:
  p:
    network:
      allow: [b.org,
        c.org]
repos:
  local:/x: {profile: p, network: {allow: [d.org], host_services: ['10.0.0.1:3']}}
`)
	c := f.load()
	set := settings(t, c, "local:/x", "")
	values, err := c.Values("local:/x", "")
	if err != nil {
		t.Fatal(err)
	}
	var allow, services []string
	for _, v := range values {
		at := fmt.Sprintf("%v %s:%d", v.Value, filepath.Base(filepath.Dir(v.Origin.File)), v.Origin.Line)
		switch v.Key {
		case "network.allow":
			allow = append(allow, at)
		case "network.host_services":
			services = append(services, at)
		}
	}
	if got, want := strings.Join(allow, ", "), "a.org etc:1, @git etc:1, b.org home:8, c.org home:9, d.org home:11"; got != want || len(allow) != len(set.Network.Allow) {
		t.Errorf("%s\n%s", got, want)
	}
	if got, want := strings.Join(services, ", "), "10.0.0.1:1 etc:1, 127.0.0.1:2 home:4, 10.0.0.1:3 home:11"; got != want {
		t.Errorf("%s\n%s", got, want)
	}
	if netip.AddrPort(set.Network.HostServices[1]).Port() != 2 {
		t.Error(set.Network.HostServices)
	}
}

func TestCheck(t *testing.T) {
	f := newFiles(t)
	f.user("config.yaml", "image: x\n")
	f.user("network-allowlist.txt", "@mine\n")
	for _, c := range []struct {
		name, text, want string
	}{
		{"network-groups/mine.txt", "a.org\n", ""},
		{"network-groups/mine.txt", "a.org\n10.0.0.1\n", "network-groups/mine.txt:2"},
		{"network-groups/other.txt", "a.org\n", "network-allowlist.txt:1"}, // the error is in another file
		{"network-allowlist.txt", "b.org\n", ""},
		{"config.yaml", "images: y\n", "config.yaml:1"},
		{"resources.yaml", "defaults: {cpus: 1}\n", "network-allowlist.txt:1"},
	} {
		err := config.Check(f.paths, f.ship, c.name, []byte(c.text))
		switch {
		case c.want == "" && err != nil:
			t.Errorf("%s %q: %v", c.name, c.text, err)
		case c.want != "" && (err == nil || !strings.Contains(err.Error(), filepath.Join(f.paths.Config, c.want)) || !strings.Contains(fail.HintOf(err), "config edit")):
			t.Errorf("%s %q: %v (%s)", c.name, c.text, err, fail.HintOf(err))
		}
	}
	f.user("network-allowlist.txt", "b.org\n")
	if f.load().Image != "x" {
		t.Error("a check has changed a file")
	}
}
