package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"hash/fnv"
	"slices"
	"strconv"
	"strings"
)

// Mutant is one small change to one file.
type Mutant struct {
	Func string // the enclosing function, with its receiver
	Op   string // the name of the change that was applied
	Text string // the replaced source text, on one line
	Nth  int    // counts mutants with the same function, operator and text, from 1

	File       string // absolute path
	Line       int
	col        int
	start, end int // byte offsets in the file
	with       string
	covered    bool
}

// Key identifies a mutant. It contains no line number, so that it survives edits elsewhere.
func (m *Mutant) Key() string {
	key := m.Func + " | " + m.Op + " | " + m.Text
	if m.Nth > 1 {
		key += fmt.Sprintf(" | %d", m.Nth)
	}
	return key
}

// rank orders the mutants of a package for sampling. It depends only on the seed and the
// key, so that an edit of one function does not change the rest of a sample.
func (m *Mutant) rank(seed, pkg string) uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(seed + "\x00" + pkg + "\x00" + m.Key())) // never fails
	return h.Sum64()
}

// finder collects the mutants of one file.
type finder struct {
	path  string
	src   []byte
	fset  *token.FileSet
	fn    string            // the current function
	errs  []bool            // whether the last result of each enclosing function is an error
	count map[string]int    // number of mutants by key without number
	spans map[string]bool   // replacements seen, by position and text
	conds map[ast.Node]bool // conditions, and the init statements of ifs
	found []*Mutant
}

// findMutants returns the mutants of all functions in a file.
func findMutants(path string, src []byte) ([]*Mutant, error) {
	f := &finder{path: path, src: src, fset: token.NewFileSet(), count: map[string]int{}, spans: map[string]bool{}, conds: map[ast.Node]bool{}}
	file, err := parser.ParseFile(f.fset, path, src, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	for _, decl := range file.Decls {
		if fn, ok := decl.(*ast.FuncDecl); ok && fn.Body != nil {
			f.fn = fn.Name.Name
			if fn.Recv != nil {
				f.fn = "(" + f.text(fn.Recv.List[0].Type) + ")." + f.fn
			}
			f.errs = []bool{lastIsError(fn.Type)}
			f.visit(fn.Body)
		}
	}
	return f.found, nil
}

func lastIsError(t *ast.FuncType) bool {
	if t.Results == nil {
		return false
	}
	last, ok := t.Results.List[len(t.Results.List)-1].Type.(*ast.Ident)
	return ok && last.Name == "error"
}

func (f *finder) offset(p token.Pos) int { return f.fset.Position(p).Offset }

func (f *finder) text(n ast.Node) string { return string(f.src[f.offset(n.Pos()):f.offset(n.End())]) }

// maxText bounds the text in a mutant's key, in characters.
const maxText = 100

// add records the mutant that replaces n with the text with.
func (f *finder) add(op string, n ast.Node, with string) {
	f.addAt(op, n.Pos(), n.End(), f.text(n), with)
}

func (f *finder) addAt(op string, pos, end token.Pos, text, with string) {
	span := fmt.Sprint(pos, end, with)
	if f.spans[span] {
		return
	}
	f.spans[span] = true
	text = strings.Join(strings.Fields(text), " ")
	if r := []rune(text); len(r) > maxText {
		text = string(r[:maxText]) + "…"
	}
	m := &Mutant{
		Func: f.fn, Op: op, Text: text,
		File: f.path, Line: f.fset.Position(pos).Line, col: f.fset.Position(pos).Column, start: f.offset(pos), end: f.offset(end), with: with,
	}
	f.count[m.Key()]++
	m.Nth = f.count[m.Key()]
	f.found = append(f.found, m)
}

// visit finds the mutants below a node.
func (f *finder) visit(n ast.Node) {
	ast.Inspect(n, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncLit:
			f.errs = append(f.errs, lastIsError(n.Type))
			f.visit(n.Body)
			f.errs = f.errs[:len(f.errs)-1]
			return false
		case *ast.CallExpr:
			if isText(n) {
				return false // the wording of an error is checked by that error's own tests
			}
			f.call(n)
		case *ast.IfStmt:
			f.conds[n.Init] = true
			f.condition(n.Cond)
		case *ast.SwitchStmt:
			if n.Tag == nil {
				for _, c := range n.Body.List {
					for _, cond := range c.(*ast.CaseClause).List {
						f.condition(cond)
					}
				}
			}
		case *ast.BlockStmt:
			f.statements(n.List)
		case *ast.CaseClause:
			f.statements(n.Body)
		case *ast.CommClause:
			f.statements(n.Body)
		case *ast.AssignStmt:
			f.ignore(n)
		case *ast.ReturnStmt:
			f.success(n)
		case *ast.BinaryExpr:
			f.binary(n)
		case *ast.BasicLit:
			f.literal(n)
		case *ast.Ident:
			if n.Name == "true" || n.Name == "false" {
				f.add("bool", n, map[string]string{"true": "false", "false": "true"}[n.Name])
			}
		case *ast.SliceExpr:
			f.bounds(n)
		}
		return true
	})
}

// condition adds two mutants of a condition: one is never true, the other always. A test
// may detect only one of these two halves of the negation.
func (f *finder) condition(c ast.Expr) {
	f.conds[c] = true
	f.add("never", c, "false && ("+f.text(c)+")")
	f.add("always", c, "true || ("+f.text(c)+")")
}

// statements adds mutants that drop a statement. The statement's text stays in the file, so
// that no variable or import becomes unused.
func (f *finder) statements(list []ast.Stmt) {
	for _, s := range list {
		op := ""
		switch s := s.(type) {
		case *ast.ExprStmt:
			op = "drop call"
		case *ast.DeferStmt:
			op = "drop defer"
		case *ast.SendStmt:
			op = "drop send"
		case *ast.IncDecStmt:
			op = "drop assignment"
		case *ast.AssignStmt:
			if s.Tok != token.DEFINE {
				op = "drop assignment"
			}
		case *ast.BranchStmt:
			if s.Tok == token.CONTINUE || s.Tok == token.BREAK {
				op = "drop " + s.Tok.String()
			}
		}
		if op != "" {
			f.add(op, s, "if false { "+f.text(s)+" }")
		}
	}
}

// ignore adds mutants of a call whose error is assigned: one skips the call, the other
// drops its error.
func (f *finder) ignore(a *ast.AssignStmt) {
	if len(a.Lhs) != 1 || len(a.Rhs) != 1 {
		return
	}
	to, ok := a.Lhs[0].(*ast.Ident)
	call, isCall := a.Rhs[0].(*ast.CallExpr)
	if !ok || !isCall || to.Name != "err" && !strings.HasSuffix(to.Name, "Err") {
		return
	}
	f.add("skip call", call, noError("return "+f.text(call)))
	if !f.conds[a] { // there the result equals the condition never being true
		f.add("ignore error", call, "func() error { _ = "+f.text(call)+"; return nil }()")
	}
}

// success adds a mutant that returns nil instead of an error.
func (f *finder) success(r *ast.ReturnStmt) {
	if !f.errs[len(f.errs)-1] || len(r.Results) == 0 {
		return
	}
	last := r.Results[len(r.Results)-1]
	if id, ok := last.(*ast.Ident); !ok || id.Name != "nil" {
		f.add("return nil", last, noError("return "+f.text(last)))
	}
}

// noError returns an expression that is a nil error and contains a statement that is never
// executed.
func noError(s string) string { return "func() error { if false { " + s + " }; return nil }()" }

var swaps = map[token.Token]struct{ op, with string }{
	token.LSS: {"boundary", "<="},
	token.LEQ: {"boundary", "<"},
	token.GTR: {"boundary", ">="},
	token.GEQ: {"boundary", ">"},
	token.EQL: {"negate", "!="},
	token.NEQ: {"negate", "=="},
	token.ADD: {"arithmetic", "-"},
	token.SUB: {"arithmetic", "+"},
	token.MUL: {"arithmetic", "/"},
	token.QUO: {"arithmetic", "*"},
	token.REM: {"arithmetic", "*"},
	token.AND: {"arithmetic", "|"},
	token.OR:  {"arithmetic", "&"},
}

func (f *finder) binary(b *ast.BinaryExpr) {
	if b.Op == token.LAND || b.Op == token.LOR {
		neutral := map[token.Token]string{token.LAND: "true", token.LOR: "false"}[b.Op]
		for _, side := range []ast.Expr{b.X, b.Y} {
			op := map[token.Token]string{token.LAND: " || ", token.LOR: " && "}[b.Op]
			f.add("drop operand", side, "("+neutral+op+"("+f.text(side)+"))")
		}
		return
	}
	swap, ok := swaps[b.Op]
	if !ok || f.conds[b] && swap.op == "negate" || isString(b.X) || isString(b.Y) && b.Op == token.ADD {
		return
	}
	f.addAt(swap.op, b.OpPos, b.OpPos+token.Pos(len(b.Op.String())), f.text(b), swap.with)
}

func (f *finder) call(c *ast.CallExpr) {
	switch fn := f.text(c.Fun); fn {
	case "min", "max":
		f.addAt("bound", c.Fun.Pos(), c.Fun.End(), f.text(c), map[string]string{"min": "max", "max": "min"}[fn])
	case "errors.Join":
		for _, arg := range c.Args {
			if _, ok := arg.(*ast.CallExpr); ok {
				f.add("skip call", arg, noError("return "+f.text(arg)))
			}
		}
	}
}

// literal adds mutants that add one to a number, widen a file mode, or empty a string.
func (f *finder) literal(l *ast.BasicLit) {
	switch {
	case l.Kind == token.INT && strings.HasPrefix(l.Value, "0o"):
		if mode, err := strconv.ParseUint(l.Value, 0, 32); err == nil && mode&0o066 != 0o066 {
			f.add("open mode", l, "("+l.Value+" | 0o066)")
		}
	case l.Kind == token.INT:
		f.add("plus one", l, "("+l.Value+" + 1)")
	case l.Kind == token.STRING && len(l.Value) > 2:
		f.add("empty text", l, `""`)
	}
}

// bounds adds mutants of a slice expression without its upper or lower bound.
func (f *finder) bounds(s *ast.SliceExpr) {
	if s.Slice3 {
		return
	}
	for _, b := range []ast.Expr{s.Low, s.High} {
		if b != nil {
			f.addAt("drop bound", b.Pos(), b.End(), f.text(s), "")
		}
	}
}

func isString(e ast.Expr) bool {
	l, ok := e.(*ast.BasicLit)
	return ok && l.Kind == token.STRING
}

// textFuncs are functions that produce text for people: errors, hints and log lines.
var textFuncs = []string{"Errorf", "WithHint", "New", "Debug", "Info", "Warn", "Error", "DebugContext", "InfoContext", "WarnContext", "ErrorContext"}

// isText reports whether a call is one of textFuncs with a string literal as an argument.
func isText(c *ast.CallExpr) bool {
	s, ok := c.Fun.(*ast.SelectorExpr)
	if !ok || !slices.Contains(textFuncs, s.Sel.Name) {
		return false
	}
	return slices.ContainsFunc(c.Args, isString)
}
