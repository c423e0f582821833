package config_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/meter"
)

func TestBudget(t *testing.T) {
	f := newFiles(t)
	f.user("config.yaml", `
budget: {session: 5 USD, day: 50 USD, tokens: 2M}
profiles:
  cheap: {budget: {session: 0.50USD, tokens: none}}
repos:
  o/r: {budget: {day: none}}
`)
	c := f.load()
	for _, test := range []struct {
		repo    config.RepoKey
		profile string
		want    config.Budget
	}{
		{"", "", config.Budget{5e9, 50e9, 2e6}},
		{"", "cheap", config.Budget{5e8, 50e9, config.Unlimited}},
		{"github.com/o/r", "cheap", config.Budget{5e8, config.Unlimited, config.Unlimited}},
	} {
		got, err := c.For(test.repo, test.profile)
		if diff := cmp.Diff(test.want, got.Budget); err != nil || diff != "" {
			t.Errorf("budget of %q with profile %q = %v (-want +got):\n%s", test.repo, test.profile, err, diff)
		}
	}
	for _, wrong := range []string{"session: 5", "session: 5 EUR", "session: 0 USD", "tokens: 0", "tokens: 2.5M", "tokens: -1", "week: 5 USD"} {
		f.user("config.yaml", "budget: {"+wrong+"}\n")
		if _, err := config.Load(f.paths, f.ship); err == nil || !strings.Contains(err.Error(), "config.yaml:1") {
			t.Errorf("budget with %s = %v, want an error with its place", wrong, err)
		}
	}
	f.user("config.yaml", "budget: {tokens: 5k}\nnetwork: {enforce: false}\n")
	c = f.load()
	set, err := c.For("", "")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Policy(set, config.Additions{}, nil); err == nil || !strings.Contains(err.Error(), "gateway") {
		t.Errorf("policy of a budget without a gateway = %v, want an error", err)
	}
}

func TestLowerBudget(t *testing.T) {
	for _, c := range []struct{ a, b, want config.Budget }{
		{config.Budget{}, config.Budget{}, config.Budget{}},
		{config.Budget{Session: 5}, config.Budget{Tokens: 7}, config.Budget{Session: 5, Tokens: 7}},
		{config.Budget{Session: 5, Day: 9}, config.Budget{Session: 6, Day: 8}, config.Budget{Session: 5, Day: 8}},
		{config.Budget{Session: config.Unlimited}, config.Budget{Session: 6, Tokens: config.Unlimited}, config.Budget{Session: 6}},
	} {
		if got := c.a.Within(c.b); got != c.want {
			t.Errorf("%+v within %+v = %+v, want %+v", c.a, c.b, got, c.want)
		}
	}
	for text, want := range map[string]config.Tokens{"1": 1, "200k": 200e3, "2M": 2e6, "none": config.Unlimited} {
		var got config.Tokens
		if err := got.Set(text); err != nil || got != want || got.String() != text {
			t.Errorf("Set(%q) = %v, %v", text, got, err)
		}
	}
}

func TestPrices(t *testing.T) {
	f := newFiles(t)
	f.system("prices.yaml", "date: 2026-02-03\nmodels: [{model: a*, input: 1, output: 2}]\n")
	f.user("prices.yaml", "models: [{model: ab, input: 3, output: 4.5}]\n")
	want := meter.Prices{Date: "2026-02-03", Models: []meter.Price{{Model: "ab", Input: 3, Output: 4.5}, {Model: "a*", Input: 1, Output: 2}}}
	if diff := cmp.Diff(want, f.load().Prices); diff != "" {
		t.Errorf("prices mismatch (-want +got):\n%s", diff)
	}
	for _, wrong := range []string{"models: [{model: a, input: cheap, output: 1}]", "models: [{model: '', input: 1, output: 1}]", "models: [{model: a, input: -1, output: 1}]", "model: a"} {
		f.user("prices.yaml", wrong+"\n")
		if _, err := config.Load(f.paths, f.ship); err == nil || !strings.Contains(err.Error(), "prices.yaml") {
			t.Errorf("prices with %s = %v, want an error with the file", wrong, err)
		}
	}
}
